"""Translates a request for OpenAI's `/v1/responses` into a chat completion, whose reply carries token ids.

The prompt is the one that vLLM's own route makes of the request. What cannot be translated is refused, and what is
invalid as vLLM refuses it.

A chat completion has functions only. A `custom` tool becomes a function of one string, and the functions of a
`namespace` get its name before theirs, as in vLLM. Other tools run at the provider: no model here can call them.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from tuneloop.explorer.http.bodies import coerce_bool, coerce_int, wrong_type
from tuneloop.shared.errors import RequestRefused

Json = dict[str, Any]

#: The value of `include` for log-probabilities.
LOGPROBS = "message.output_text.logprobs"

_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        LOGPROBS,
        "reasoning.encrypted_content",
    }
)

#: Fields that mean the same in a chat completion. `store`, `metadata` and the two of the user are for the explorer.
_SHARED_FIELDS = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("include_stop_str_in_output", "structured_outputs", "watermarking", "vllm_xargs", "kv_transfer_params"),
    *("ec_transfer_params", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "cache_salt"),
    *("priority", "session_id", "store", "metadata", "user", "safety_identifier"),
)

#: The types of the fields that are not passed on, where vLLM checks them.
_FIELD_TYPES: dict[type, tuple[str, tuple[str, ...]]] = {
    str: (
        "a string",
        ("instructions", "previous_response_id", "prompt_cache_key", "user", "truncation", "service_tier"),
    ),
    list: ("a list", ("tools", "include")),
    dict: ("an object", ("metadata", "text", "reasoning")),
}

#: The same of the fields that vLLM coerces.
_INT_FIELDS = ("max_output_tokens", "max_tool_calls", "top_logprobs")
_BOOL_FIELDS = ("stream", "background", "include_reasoning", "parallel_tool_calls", "enable_response_messages")

_FIELD_VALUES = {"truncation": {"auto", "disabled"}, "service_tier": {"auto", "default", "flex", "scale", "priority"}}

#: The types of content parts, of input and of earlier output.
_INPUT_PARTS = frozenset({"input_text", "input_image"})
_OUTPUT_PARTS = frozenset({"output_text", "refusal"})

#: The types of tools that a model can call, and of tool choices that name some of them.
_CALLABLE = ("function", "custom", "namespace")
_NAMING = ("function", "custom", "allowed_tools")

#: The one parameter of a custom tool's function, as vLLM names it.
_INPUT = "input"


def normalize(body: Json) -> Json:
    """The body with the numbers and booleans that vLLM makes of what the client wrote. Raises RequestRefused."""
    if not isinstance(body.get("metadata"), dict | None):
        raise wrong_type("metadata", "an object")
    changed = {name: coerce_int(body[name], name) for name in _INT_FIELDS if body.get(name) is not None}
    changed |= {name: coerce_bool(body[name], name) for name in _BOOL_FIELDS if body.get(name) is not None}
    return body | changed


class NamedTool(NamedTuple):
    kind: str
    name: str
    namespace: str | None


def named_tools(body: Json) -> dict[str, NamedTool]:
    return {_flat(space, tool["name"]): NamedTool(tool["type"], tool["name"], space) for space, tool in _callable(body)}


def hosted_tools(body: Json) -> list[str]:
    found = [tool.get("type") for _, tool in _each_tool(body)]
    return [each for each in dict.fromkeys(found) if isinstance(each, str) and each not in _CALLABLE]


def left_out(body: Json) -> tuple[str, ...]:
    """What of the tools the engine does not get: those that no model here can call, and grammars of free text."""
    formats = [
        f"tools.{tool['name']}.format"
        for _, tool in _callable(body)
        if isinstance(form := tool.get("format"), dict) and form.get("type") != "text"
    ]
    return *(f"tools.{each}" for each in hosted_tools(body)), *formats


def custom_input(arguments: str) -> str:
    """The free text in the arguments of a custom tool's function; the arguments, if they have another form."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def to_chat(body: Json, previous: Sequence[Json] = ()) -> Json:
    """The equivalent chat completion after the `previous` messages. Raises RequestRefused for what vLLM refuses."""
    _check(body)
    items = body.get("input")
    chat = {name: body[name] for name in _SHARED_FIELDS if body.get(name) is not None}
    instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat["messages"] = [*instructions, *previous, *_messages(items)]
    if (most := body.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if body.get("truncation") == "auto":
        chat["truncate_prompt_tokens"] = -1
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if wants_logprobs(body):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    last = items[-1] if isinstance(items, list) else {}
    is_unfinished = last.get("status") in ("in_progress", "incomplete")
    if is_unfinished and last.get("type", "message") in ("message", "reasoning"):
        # The model is to continue this item rather than answer it.
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.get("stream"):
        # The response shows at its start how long it may get, which depends on the prompt.
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return chat | _format(body) | _tools(body)


def continued_messages(body: Json, response: Json, previous: Sequence[Json] = ()) -> list[Json]:
    """The messages that a request continues. As in vLLM, instructions, reasoning and calls are not carried over."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    messages = [*previous, *_messages(body.get("input"))]
    return [
        *(message for message in messages if message["role"] != "system"),
        *({"role": "assistant", "content": part["text"]} for part in parts),
    ]


def wants_logprobs(body: Json) -> bool:
    return LOGPROBS in (body.get("include") or ())


def tool_choice(body: Json) -> Any:
    return body.get("tool_choice", "auto") if body.get("tools") else "none"


def _check(body: Json) -> None:
    for kind, (wanted, params) in _FIELD_TYPES.items():
        for param in params:
            value = body.get(param)
            if value is not None and not isinstance(value, kind):
                raise wrong_type(param, wanted)
    for param, values in _FIELD_VALUES.items():
        if body.get(param) is not None:
            _one_of(body[param], values, param)
    for included in body.get("include") or ():
        _one_of(included, _INCLUDABLE, "include")
    if (most := body.get("max_output_tokens")) is not None and most < 1:
        raise RequestRefused("max_output_tokens must be at least 1", code="out_of_range", param="max_output_tokens")
    for param, why in (
        ("prompt", "prompt templates are not supported"),
        ("conversation", "no conversations are kept: send previous_response_id, or all turns as input"),
        ("context_management", "context_management is not supported: remove items from input yourself"),
        ("enable_response_messages", "messages as tokens are not returned: ask /v1/chat/completions for token ids"),
        ("previous_input_messages", "send previous_response_id, or all turns as input"),
    ):
        if body.get(param) not in (None, False, []):
            raise RequestRefused(why, code="unsupported", param=param)
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") not in _NAMING:
        why = f"tool_choice: no engine runs tools of the type {str(choice.get('type'))[:100]!r}: {', '.join(_NAMING)}"
        raise RequestRefused(why, code="unsupported", param="tool_choice")


def _messages(items: Any) -> list[Json]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise wrong_type("input", "a string or a list")
    if not items:
        raise RequestRefused("input must not be empty", code="invalid_value", param="input")
    messages: list[Json] = []
    for number, item in enumerate(items):
        param = f"input[{number}]"
        if not isinstance(item, dict):
            raise wrong_type(param, "an object")
        message = _message(item, param)
        if not (messages and _merge_into(messages[-1], message)):
            messages.append(message)
    return messages


def _merge_into(turn: Json, message: Json) -> bool:
    if turn["role"] != "assistant" or message["role"] != "assistant":
        return False
    if "tool_calls" in message:
        turn.setdefault("tool_calls", []).extend(message["tool_calls"])
        return True
    key = next(each for each in ("content", "reasoning") if each in message)
    if turn.get(key) is not None:
        return False
    turn[key] = message[key]
    return True


def _message(item: Json, param: str) -> Json:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            _one_of(role, ("user", "assistant", "system", "developer"), f"{param}.role")
            parts = _INPUT_PARTS | _OUTPUT_PARTS if role == "assistant" else _INPUT_PARTS
            param = f"{param}.content"
            content = _content(item.get("content"), param, parts)
            if role != "assistant" or not isinstance(content, list):
                return {"role": role, "content": content}
            if not content:
                raise RequestRefused(f"{param} must not be empty", code="invalid_value", param=param)
            # vLLM's own route reads only the first part of an assistant's message.
            return {"role": role, "content": _text(content[0], "text", f"{param}[0]")}
        case "function_call":
            return {"role": "assistant", "tool_calls": [_call(item, param)]}
        case "custom_tool_call":
            arguments = json.dumps({_INPUT: item.get("input") or ""}, ensure_ascii=False)
            return {"role": "assistant", "tool_calls": [_call({**item, "arguments": arguments}, param)]}
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item.get("output"), f"{param}.output", _INPUT_PARTS)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "reasoning":
            return {"role": "assistant", "reasoning": _reasoning(item, param)}
        case other:
            raise RequestRefused(f"{param}: items of type {other!r} are not supported", code="unsupported", param=param)


def _content(content: Any, param: str, parts: Collection[str]) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(param, "a string or a list")
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong_type(f"{param}[{number}]", "an object")
        _one_of(part.get("type"), parts, f"{param}[{number}].type")
    found: list[Json] = []
    for number, part in enumerate(content):
        place = f"{param}[{number}]"
        if part["type"] == "input_image":
            # vLLM ignores the detail, and a chat completion has fewer values.
            detail = part["detail"] if part.get("detail") in ("low", "high") else "auto"
            image = {"url": _text(part, "image_url", place), "detail": detail}
            found.append({"type": "image_url", "image_url": image})
        else:
            key = "refusal" if part["type"] == "refusal" else "text"
            found.append({"type": "text", "text": _text(part, key, place)})
    return found


def _call(item: Json, param: str) -> Json:
    call_id, name, arguments = (_text(item, key, param) for key in ("call_id", "name", "arguments"))
    function = {"name": _flat(item.get("namespace"), name), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _reasoning(item: Json, param: str) -> str:
    if item.get("encrypted_content"):
        raise RequestRefused(f"{param}: encrypted reasoning cannot be read", code="unsupported", param=param)
    summary = item.get("summary")
    if not isinstance(summary, list):
        raise wrong_type(f"{param}.summary", "a list")
    parts = item.get("content") or summary
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise wrong_type(f"{param}.content", "a list of objects")
    return _text(parts[0], "text", param) if parts else ""


def _format(body: Json) -> Json:
    output_format = (body.get("text") or {}).get("format")
    if output_format is None:
        return {}
    if not isinstance(output_format, dict):
        raise wrong_type("text.format", "an object")
    _one_of(output_format.get("type"), ("text", "json_object", "json_schema"), "text.format.type")
    if body.get("structured_outputs") is not None:
        message = "structured_outputs and text.format exclude each other"
        raise RequestRefused(message, code="invalid_value", param="structured_outputs")
    if output_format["type"] == "json_schema":
        _text(output_format, "name", "text.format")
        if not isinstance(output_format.get("schema"), dict):
            raise wrong_type("text.format.schema", "an object")
        schema = {
            key: output_format[key]
            for key in ("name", "description", "schema", "strict")
            if output_format.get(key) is not None
        }
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": {"type": output_format["type"]}}


def _flat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _each_tool(body: Json) -> Iterator[tuple[str | None, Json]]:
    """The tools of a request, those of a namespace one by one, and the namespace of each."""
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            inner, space = ([tool], None) if tool.get("type") != "namespace" else (tool.get("tools"), tool.get("name"))
            yield from ((space, each) for each in (inner if isinstance(inner, list) else ()) if isinstance(each, dict))


def _callable(body: Json) -> Iterator[tuple[str | None, Json]]:
    return (pair for pair in _each_tool(body) if pair[1].get("type") in ("function", "custom") and pair[1].get("name"))


def _tools(body: Json) -> Json:
    tools = body.get("tools") or []
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    requested, functions = body.get("tool_choice", "auto"), [_function(*each) for each in _callable(body)]
    by_name = {each["function"]["name"]: each for each in functions}
    if isinstance(requested, dict) and requested.get("type") == "allowed_tools":
        allowed = requested.get("tools")
        names = [each.get("name") for each in allowed if isinstance(each, dict)] if isinstance(allowed, list) else []
        functions = [by_name[name] for name in names if name in by_name]
        requested = requested.get("mode", "auto")
    if isinstance(requested, dict):
        name = _flat(requested.get("namespace"), str(requested.get("name") or ""))
        named = next((each for each in by_name if each == name or each.endswith(f"__{name}")), None) if name else None
        if named is None:
            raise RequestRefused("tool_choice must name one of tools", code="invalid_value", param="tool_choice")
        requested = {"type": "function", "function": {"name": named}}
    else:
        _one_of(requested, ("none", "auto", "required"), "tool_choice")
    if not functions and (tools or requested == "required"):
        hosted = " and ".join(hosted_tools(body))
        why = f"{hosted}: such tools run at the provider, no model here can call them" if hosted else "no tool is left"
        param = "tools" if tools else "tool_choice"
        raise RequestRefused(why, code="unsupported" if hosted else "invalid_value", param=param)
    if not functions:
        return {}
    chat: Json = {"tools": functions, "tool_choice": requested}
    if body.get("parallel_tool_calls") is not None:
        chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    return chat


def _check_tool(tool: Any, param: str) -> None:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object")
    kind = _text(tool, "type", param)
    if kind in _CALLABLE:
        _text(tool, "name", param)
    if kind == "namespace":
        if not isinstance(tool.get("tools"), list):
            raise wrong_type(f"{param}.tools", "a list")
        for number, each in enumerate(tool["tools"]):
            _check_tool(each, f"{param}.tools[{number}]")
    if not isinstance(tool.get("parameters"), dict | None):
        raise wrong_type(f"{param}.parameters", "an object")


def _function(namespace: str | None, tool: Json) -> Json:
    fields = ("description", "parameters", "strict", "defer_loading")
    stated = {key: tool[key] for key in fields if tool.get(key) is not None}
    if tool["type"] == "custom":
        form = tool.get("format")
        if isinstance(form, dict) and form.get("definition"):
            # Nothing enforces it, so the model reads it.
            rule = f"The input must match this {form.get('syntax')} grammar:\n{form['definition']}"
            stated["description"] = "\n\n".join(filter(None, [tool.get("description"), rule]))
        text = {"type": "string", "description": "The freeform text payload for this tool."}
        stated["parameters"] = {
            **{"type": "object", "properties": {_INPUT: text}},
            **{"required": [_INPUT], "additionalProperties": False},
        }
    return {"type": "function", "function": {"name": _flat(namespace, tool["name"]), **stated}}


def _text(holder: Json, key: str, param: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise wrong_type(f"{param}.{key}", "a string")
    return value


def _one_of(value: object, values: Collection[str], param: str) -> None:
    if not isinstance(value, str) or value not in values:
        raise RequestRefused(f"{param} must be one of {', '.join(sorted(values))}", code="invalid_value", param=param)
