"""Translates Anthropic's messages, which have no token ids in vLLM, to chat completions, and replies back."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from tuneloop.explorer.http.bodies import wrong_type
from tuneloop.explorer.http.errors import anthropic_error
from tuneloop.shared.errors import RequestRefused

Json = dict[str, Any]

#: Fields of the same name and meaning on both sides.
_SHARED_FIELDS = (
    "model",
    "temperature",
    "top_k",
    "top_p",
    "cache_salt",
    "chat_template_kwargs",
    "ec_transfer_params",
    "kv_transfer_params",
    "vllm_xargs",
    "watermarking",
)

BUDGET = "thinking_token_budget"

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

#: Claude Code's billing header carries a hash of the request; in a prompt it would make every prefix a new one.
_BILLING = "x-anthropic-billing-header"


class Tool(BaseModel):
    name: str
    description: str | None = None
    input_schema: Annotated[
        Json, AfterValidator(lambda schema: schema if "type" in schema else {**schema, "type": "object"})
    ]
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(BaseModel):
    type: Literal["tool_reference"]
    name: str


class ToolDefinition(BaseModel):
    type: Literal["tool_definition"]
    definition: Tool


class Block(BaseModel):
    """One piece of a message's content; which of the fields mean something depends on its type."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: Json | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: Json | None = None
    content: str | list[Json] | None = None
    thinking: str | None = None
    tool: Annotated[ToolReference | ToolDefinition, Field(discriminator="type")] | None = None

    @property
    def changes_tools(self) -> bool:
        return self.type in {"tool_addition", "tool_removal"}

    @model_validator(mode="after")
    def _names_its_tool(self) -> "Block":
        if self.changes_tools and self.tool is None:
            raise ValueError(f"tool is required for {self.type} blocks")
        if self.type == "tool_removal" and isinstance(self.tool, ToolDefinition):
            raise ValueError("tool_removal only accepts a tool_reference")
        return self


def _without_tool_changes(content: str | list[Block] | None) -> str | list[Block] | None:
    if isinstance(content, list) and (change := next((each for each in content if each.changes_tools), None)):
        raise ValueError(f'{change.type} blocks are only allowed in messages with role "system"')
    return content


class Turn(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return self.content if isinstance(self.content, list) else []

    @model_validator(mode="after")
    def _only_system_changes_tools(self) -> "Turn":
        if self.role != "system":
            _without_tool_changes(self.content)
        return self


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_the_tool(self) -> "ToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("name is required when type is 'tool'")
        return self


class OutputFormat(BaseModel):
    type: Literal["json_schema"] = "json_schema"
    json_schema: Json | None = Field(default=None, alias="schema")


class OutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingEnabled(BaseModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024)


class ThinkingUnbudgeted(BaseModel):
    type: Literal["disabled", "adaptive"]


class MessagesRequest(BaseModel):
    model: str = Field(min_length=1)
    messages: list[Turn]
    max_tokens: int = Field(gt=0)
    metadata: Json | None = None
    output_config: OutputConfig | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingUnbudgeted, Field(discriminator="type")] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    system: Annotated[str | list[Block] | None, AfterValidator(_without_tool_changes)] = None
    temperature: float | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_k: int | None = None
    top_p: float | None = None

    # vLLM's own, which its chat completions have under the same names, and check.
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    @model_validator(mode="after")
    def _thinking_budget_below_max_tokens(self) -> "MessagesRequest":
        # With disaggregated serving the prefill engine is asked for one token; the decode engine is asked again.
        prefill_only = isinstance(self.kv_transfer_params, dict) and self.kv_transfer_params.get("do_remote_decode")
        budget = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else 0
        if budget >= self.max_tokens and not prefill_only:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


def anthropic_tools(body: Json) -> list[str]:
    """The types of the tools that Anthropic describes itself, and runs or knows the schema of: no model here does."""
    tools = body["tools"] if isinstance(body.get("tools"), list) else ()
    return list(dict.fromkeys(str(tool["type"]) for tool in tools if _is_hosted(tool)))


def own_tools(body: Json) -> list[Any]:
    """The other tools. Raises RequestRefused where there are none: what is asked cannot be done without."""
    if found := [tool for tool in body["tools"] if not _is_hosted(tool)]:
        return found
    why = f"{' and '.join(anthropic_tools(body))}: such tools run at Anthropic, no model here can call them"
    raise RequestRefused(why, code="unsupported", param="tools")


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") not in (None, "custom") and "input_schema" not in tool


def parse_messages_request(body: Json) -> MessagesRequest:
    try:
        return MessagesRequest.model_validate(body)
    except ValidationError as error:
        # Of the forms of a union, the one whose validation got furthest is most likely the one that was intended.
        mistake = max(error.errors(), key=lambda each: len(each["loc"]))
        # The name of the form is not part of the path: "str", "list[...]".
        path = ".".join(str(part) for part in mistake["loc"] if part != "str" and "[" not in str(part))
        message = mistake["msg"].removeprefix("Value error, ")
        raise RequestRefused(
            f"{path}: {message}" if path else message, code="invalid_value", param=path or None
        ) from None


def to_chat(body: Json) -> Json:
    request = parse_messages_request(body | {"tools": own_tools(body)} if anthropic_tools(body) else body)
    metadata, thinking, config = request.metadata, request.thinking, request.output_config
    turns = [each for turn in request.messages for each in _messages(turn)]
    if request.messages and all(each["role"] == "system" for each in turns):  # of empty text alone
        turns.append({"role": "user", "content": ""})
    if metadata is not None and metadata.get("user_id") is not None:  # it is our user
        metadata = {"user": metadata["user_id"], **{key: metadata[key] for key in metadata if key != "user_id"}}
    chat: Json = {
        **{name: getattr(request, name) for name in _SHARED_FIELDS},
        "messages": [*_system(request.system), *turns],
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "metadata": metadata,
        "store": body.get("store"),
        **_tools(request),
    }
    if config is not None:
        schema = config.format and config.format.json_schema
        shape = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}} if schema else None
        chat |= {"reasoning_effort": config.effort, "response_format": shape}
    if isinstance(thinking, ThinkingEnabled):
        chat[BUDGET] = thinking.budget_tokens
    elif thinking and thinking.type == "disabled":
        chat["reasoning_effort"] = "none"
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return {name: value for name, value in chat.items() if value is not None}


def to_message(reply: Json, *, msg_id: str) -> Json:
    choice = reply["choices"][0]
    message = choice["message"]
    blocks: list[Json] = []
    if message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": thinking_signature()})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    has_tool_call = False
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = orjson.loads(function["arguments"])
        except orjson.JSONDecodeError:
            arguments = None
        if isinstance(arguments, dict):
            has_tool_call = True
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        else:  # cut short, or not an object: shown as text rather than run or lost
            blocks.append({"type": "text", "text": function["arguments"]})
    stop_reason, stop_sequence = stop_reason_of(
        choice.get("finish_reason"), choice.get("stop_reason"), has_tool_call=has_tool_call, complete=has_tool_call
    )
    anthropic_message = {
        "id": msg_id,
        "type": "message",
        "role": "assistant",
        # Some clients assume that there is a first block.
        "content": blocks or [{"type": "text", "text": ""}],
        "model": reply.get("model"),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": to_usage(reply.get("usage")),
        "kv_transfer_params": reply.get("kv_transfer_params"),
        "ec_transfer_params": reply.get("ec_transfer_params"),
    }
    return {name: value for name, value in anthropic_message.items() if value is not None}


def to_usage(counts: Json | None) -> Json:
    counts = counts or {}
    details = counts.get("prompt_tokens_details") or {}
    cached = {
        "cache_read_input_tokens": details.get("cached_tokens"),
        "cache_creation_input_tokens": details.get("created_cache_tokens"),
    }
    cache_counts = {name: count for name, count in cached.items() if count is not None}
    uncached = (counts.get("prompt_tokens") or 0) - sum(cache_counts.values())
    return {"input_tokens": max(0, uncached), "output_tokens": counts.get("completion_tokens") or 0, **cache_counts}


def stop_reason_of(
    finish_reason: str | None, matched: str | int | None, *, has_tool_call: bool, complete: bool
) -> tuple[str | None, str | None]:
    """Anthropic's stop_reason and stop_sequence. `complete` is False for a call that `matched` may have cut short."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason not in {"stop", "tool_calls"}:
        return None, None
    if isinstance(matched, str) and not complete:
        return "stop_sequence", matched
    # A call that was forced by name ends with "stop".
    return ("tool_use" if has_tool_call or finish_reason == "tool_calls" else "end_turn"), None


def thinking_signature() -> str:
    """Anthropic signs thinking blocks; the signature is not checked here, but clients require one."""
    return uuid.uuid4().hex


def _system(system: str | list[Block] | None) -> list[Json]:
    if not isinstance(system, str):
        texts = (block.text for block in system or () if block.type == "text" and block.text)
        system = "".join(text for text in texts if not text.startswith(_BILLING))
    return [{"role": "system", "content": system}] if system else []


def _messages(turn: Turn) -> Iterator[Json]:
    if turn.role == "system":
        content = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        yield from _system(content)
    elif isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    else:
        if turn.role == "user":
            yield from (each for block in turn.content if block.type == "tool_result" for each in _result(block))
        message: Json = {"role": turn.role}
        thoughts = [each.thinking for each in turn.blocks if each.type == "thinking" and each.thinking is not None]
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        if calls := [block for block in turn.blocks if block.type == "tool_use"]:
            message["tool_calls"] = [
                {
                    "id": block.id or "call_0",
                    "type": "function",
                    "function": {"name": block.name or "", "arguments": orjson.dumps(block.input or {}).decode()},
                }
                for block in calls
            ]
        if parts := [part for block in turn.blocks for part in _parts(block, turn.role)]:
            alone = len(parts) == 1 and parts[0]["type"] == "text"
            message["content"] = parts[0]["text"] if alone else parts
        if "content" in message or turn.role == "assistant":
            yield message


def _parts(block: Block, role: str) -> Iterator[Json]:
    if block.type == "text" and block.text:
        yield {"type": "text", "text": block.text}
    elif block.type == "image" and block.source:
        yield _image(_image_url(block.source))
    elif block.type == "tool_result" and role == "assistant":
        yield {"type": "text", "text": f"Tool result: {block.content or ''}"}


def _image(url: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _image_url(source: Json) -> Any:
    if source.get("type") == "url":
        return source.get("url", "")
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _result(block: Block) -> Iterator[Json]:
    """A tool's result: its text, then its images (as a user message), then the tools that it references."""
    items = block.content if isinstance(block.content, list) else [{"type": "text", "text": block.content or ""}]
    result = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    yield result | {
        "content": "\n".join(_typed_field(item, "text", "", str) for item in items if item.get("type") == "text")
    }
    sources = [_typed_field(item, "source", {}, dict) for item in items if item.get("type") == "image"]
    if images := [_image(url) for url in map(_image_url, sources) if url]:
        yield {"role": "user", "content": images}
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    if found := [{"type": "tool_reference", "name": name} for name in names if name]:
        yield result | {"content": found}


def _typed_field(item: Json, name: str, default: Any, kind: type) -> Any:
    value = item.get(name, default)
    if not isinstance(value, kind):
        raise wrong_type(f"tool_result.content.{name}", "a string" if kind is str else "an object")
    return value


def _tools(request: MessagesRequest) -> Json:
    tools, choice = _final_tools(request), request.tool_choice
    if not tools:
        return {}
    functions = [{"parameters": tool.input_schema, **tool.model_dump(exclude={"input_schema"})} for tool in tools]
    stated = [{name: value for name, value in each.items() if value is not None} for each in functions]
    fields: Json = {"tools": [{"type": "function", "function": each} for each in stated], "tool_choice": "auto"}
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = _TOOL_CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _final_tools(request: MessagesRequest) -> list[Tool]:
    changes = [block for turn in request.messages for block in turn.blocks if block.changes_tools]
    if not changes:
        return request.tools or []
    tools = {tool.name: tool for tool in request.tools or ()}
    removed: set[str] = set()
    for block in changes:
        if isinstance(block.tool, ToolDefinition):
            tools[block.tool.definition.name] = block.tool.definition
            removed.discard(block.tool.definition.name)
        elif block.tool is not None:
            name = block.tool.name
            if name not in tools:
                raise RequestRefused(
                    f"{block.type} references tool {name!r}, which is not declared in tools",
                    code="invalid_value",
                    param="messages",
                )
            if block.type == "tool_removal":
                removed.add(name)
            else:
                removed.discard(name)
                tools[name] = tools[name].model_copy(update={"defer_loading": None})
    return [tool for name, tool in tools.items() if name not in removed]


class MessageStream:
    """One streamed message. Sans-I/O: chunks in, bytes of server-sent events out.

    A message is a sequence of blocks, one open at a time; chat completions have text, reasoning and calls side by side.
    """

    def __init__(self, *, msg_id: str) -> None:
        self._msg_id = msg_id
        self._started = False
        self._broken = False
        self._index = 0
        #: The type of the open block, and the id of its tool call, if it is one.
        self._open: str | None = None
        self._call_id: str | None = None
        #: Text that came while a tool call is open; a closed block cannot be reopened, so it waits for the call's end.
        self._held_text: list[str] = []
        self._call_ids: dict[int, str] = {}
        #: The arguments of the last call, the only one that a stop string can have cut short.
        self._arguments: list[str] = []
        self._finish_reason: str | None = None
        self._matched: str | int | None = None

    def add_chunk(self, chunk: Json) -> bytes:
        return b"" if self._broken else b"".join(self._events(chunk))

    def end(self) -> bytes:
        return b"" if self._broken else b"".join((*self._close(), _event("message_stop")))

    def _events(self, chunk: Json) -> Iterator[bytes]:
        if "error" in chunk:
            self._broken = True
            error = chunk["error"] if isinstance(chunk["error"], dict) else {}
            status = error["code"] if isinstance(error.get("code"), int) else 500
            message = str(error.get("message") or "the engine broke off its reply")
            yield _event("error", error=anthropic_error(message, status=status)["error"])
            return
        if not self._started:
            self._started = True
            begun: Json = {
                "id": self._msg_id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": chunk.get("model"),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": to_usage(chunk.get("usage")),
            }
            yield _event("message_start", message=begun)
        if not chunk["choices"]:
            yield from self._close()
            yield self._stop(chunk)
            return
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish_reason, self._matched = choice["finish_reason"], choice.get("stop_reason")
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning"):
            yield from self._reopen("thinking", {"thinking": ""})
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        if text := delta.get("content"):
            if self._open == "tool_use":
                self._held_text.append(text)
            else:
                yield from self._add_text(text)
        for call in delta.get("tool_calls") or ():
            yield from self._add_tool_call(call)

    def _add_tool_call(self, call: Json) -> Iterator[bytes]:
        function = call.get("function") or {}
        if call.get("id") is not None:
            self._call_ids[call["index"]] = call["id"]
            if call["id"] != self._call_id and function.get("name") is not None:
                yield from self._close()
                yield from self._begin("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
                self._call_id, self._arguments = call["id"], []
        call_id, arguments = self._call_ids.get(call["index"]), function.get("arguments")
        if arguments and call_id is not None and call_id == self._call_id:
            self._arguments.append(arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _add_text(self, text: str) -> Iterator[bytes]:
        yield from self._reopen("text", {"text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _reopen(self, kind: str, block: Json) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            yield from self._begin(kind, block)

    def _begin(self, kind: str, block: Json) -> Iterator[bytes]:
        self._open = kind
        yield _event("content_block_start", content_block={"type": kind, **block}, index=self._index)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", delta=delta, index=self._index)

    def _close(self) -> Iterator[bytes]:
        """End the open block; text that waited for its end becomes a block of its own."""
        yield from self._end_block()
        if self._held_text:
            text, self._held_text = "".join(self._held_text), []
            yield from self._add_text(text)
            yield from self._end_block()

    def _end_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": thinking_signature()})
        yield _event("content_block_stop", index=self._index)
        self._open, self._call_id = None, None
        self._index += 1

    def _stop(self, chunk: Json) -> bytes:
        has_tool_call = complete = bool(self._call_ids)
        try:
            orjson.loads("".join(self._arguments))
        except orjson.JSONDecodeError:
            complete = False
        stop_reason, stop_sequence = stop_reason_of(
            self._finish_reason or "stop",
            self._matched,
            has_tool_call=has_tool_call,
            complete=complete,
        )
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return _event("message_delta", delta=delta, usage=to_usage(chunk.get("usage")))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
