"""Translates a chat completion into the response object of vLLM's own `/v1/responses`, field by field."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tuneloop.explorer.dialects.responses_request import tool_choice, wants_logprobs

Json = dict[str, Any]

#: The lowest temperature above 0 that vLLM samples with.
_LOWEST_TEMPERATURE = 0.01

#: Fields of a request that are echoed, with their defaults.
_ECHOED: Mapping[str, Any] = {
    **{"instructions": None, "metadata": None, "previous_response_id": None, "prompt": None, "user": None},
    **{"max_tool_calls": None, "parallel_tool_calls": True, "service_tier": "auto", "truncation": "disabled"},
    **{"background": False, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}

#: The defaults of fields of a request's objects, which are echoed too.
_TOOL = dict.fromkeys(
    ("parameters", "strict", "allowed_callers", "async", "defer_loading", "description", "output_schema")
)
_REASONING = dict.fromkeys(("context", "effort", "generate_summary", "mode", "summary"))
_TEXT = dict.fromkeys(("format", "verbosity"))
_SCHEMA = dict.fromkeys(("description", "strict"))


def to_response(
    body: Json, reply: Json, *, response_id: str, created_at: int, context_length: int | None = None
) -> Json:
    """The response to a request that `to_chat` translated; `reply` is the chat completion.

    `context_length` is the engine's. The service's defaults, such as the temperature, belong into `body`.
    """
    choice, usage = reply["choices"][0], reply["usage"]
    in_progress = in_progress_response(
        body,
        response_id=response_id,
        created_at=created_at,
        model=reply["model"],
        remaining=remaining_context(context_length, usage),
    )
    message, shown = choice["message"], shows_reasoning(body)
    items: list[Json] = []
    if shown and message.get("reasoning"):
        thought = {"type": "reasoning_text", "text": message["reasoning"]}
        items.append(reasoning_item(item_id("rs", response_id, items), [thought], status=None))
    if message.get("content"):
        logprobs = (logprobs_of(choice) or None) if shown and wants_logprobs(body) else None
        name, part = item_id("msg", response_id, items), text_part(message["content"], logprobs)
        items.append(message_item(name, [part], status="completed"))
    for each in message.get("tool_calls") or ():
        function = each["function"]
        name = item_id("fc", response_id, items)
        items.append(function_call_item(name, each["id"], function["name"], function["arguments"], status="completed"))
    finish_reason = choice["finish_reason"]
    # A chat completion with a function call has that finish_reason even when it was cut off after the call.
    if finish_reason == "tool_calls" and usage and usage["completion_tokens"] == in_progress["max_output_tokens"]:
        finish_reason = "length"
    return finish_response(in_progress, items, finish_reason=finish_reason, reply=reply)


def in_progress_response(body: Json, *, response_id: str, created_at: int, model: str, remaining: int | None) -> Json:
    """The response before anything is sampled. `remaining` is what the prompt leaves of the context."""
    temperature, top_p = (1.0 if body.get(name) is None else float(body[name]) for name in ("temperature", "top_p"))
    limits = [limit for limit in (body.get("max_output_tokens"), remaining) if limit is not None]
    given = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    text, form = body.get("text"), (body.get("text") or {}).get("format")
    if text is not None:
        text = _TEXT | text | ({"format": _SCHEMA | form} if form and form["type"] == "json_schema" else {})
    return {
        **_ECHOED,
        **given,
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "temperature": max(temperature, _LOWEST_TEMPERATURE) if temperature else 0.0,
        # Greedy sampling has no nucleus.
        "top_p": top_p if temperature else 1.0,
        "top_logprobs": (body.get("top_logprobs") or 0) if wants_logprobs(body) else None,
        "max_output_tokens": min(limits, default=None),
        "tool_choice": tool_choice(body),
        "tools": [_TOOL | tool if tool.get("type") == "function" else tool for tool in body.get("tools") or ()],
        "text": text,
        "reasoning": None if body.get("reasoning") is None else _REASONING | body["reasoning"],
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
    }


def finish_response(in_progress: Json, output: list[Json], *, finish_reason: str | None, reply: Json) -> Json:
    """The finished response. `reply` is the chat completion, or the last chunk of a streamed one."""
    cut_off = finish_reason == "length"
    passed_through = ("kv_transfer_params", "ec_transfer_params", "metrics")
    usage = reply["usage"]
    if usage is not None:
        prompt, completion = (usage.get(f"{each}_tokens_details") or {} for each in ("prompt", "completion"))
        usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": prompt.get("cached_tokens") or 0,
                "cache_write_tokens": prompt.get("created_cache_tokens") or 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": completion.get("reasoning_tokens") or 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage["total_tokens"],
        }
    return {
        **in_progress,
        "status": "incomplete" if cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": output,
        "usage": usage,
        **{name: reply[name] for name in passed_through if reply.get(name) is not None},
    }


def remaining_context(context_length: int | None, usage: Json | None) -> int | None:
    """How many tokens a reply may have by its engine's context length, where both are known."""
    return None if context_length is None or usage is None else context_length - usage["prompt_tokens"]


def item_id(kind: str, response_id: str, before: Sequence[Json]) -> str:
    """The id of the item that follows these, in the form of vLLM's: the same each time."""
    number = sum(item["id"].startswith(f"{kind}_") for item in before)
    return f"{kind}_{hashlib.blake2b(f'{response_id}/{kind}/{number}'.encode(), digest_size=8).hexdigest()}"


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(name: str, content: list[Json], *, status: str) -> Json:
    """The item of a message."""
    fields = {"type": "message", "id": name, "role": "assistant", "content": content}
    return {**fields, "status": status, "phase": None}


def reasoning_item(name: str, content: list[Json] | None, *, status: str | None) -> Json:
    """The item of reasoning."""
    fields = {"type": "reasoning", "id": name, "summary": [], "content": content}
    return {**fields, "encrypted_content": None, "status": status}


def function_call_item(item: str, call_id: str, name: str, arguments: str, *, status: str) -> Json:
    """The item of one function call."""
    fields = {"type": "function_call", "id": item, "call_id": call_id, "name": name, "arguments": arguments}
    return {**fields, "status": status, "async": None, "caller": None, "namespace": None}


def logprobs_of(choice: Json) -> list[Json]:
    """The log-probabilities of a choice, in the form that both routes share."""
    return (choice.get("logprobs") or {}).get("content") or []


def shows_reasoning(body: Json) -> bool:
    """Whether the client gets the reasoning, and log-probabilities, which would reveal it."""
    return body.get("include_reasoning") is not False
