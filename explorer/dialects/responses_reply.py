"""Translates a chat completion into what vLLM's own `/v1/responses` answers: a response object, or its events."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from tuneloop.explorer.dialects.responses_request import (
    NamedTool,
    custom_input,
    named_tools,
    tool_choice,
    wants_logprobs,
)
from tuneloop.explorer.http.errors import TOO_LONG

Json = dict[str, Any]

#: The lowest temperature above 0 that vLLM samples with.
_LOWEST_TEMPERATURE = 0.01

_UNNAMED = NamedTool("function", "", None)

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
    """The response to a request that `to_chat` translated. The service's defaults belong into `body`."""
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
    tools = named_tools(body)
    for each in message.get("tool_calls") or ():
        function = each["function"]
        tool = tools.get(function["name"]) or NamedTool("function", function["name"], None)
        name = item_id("ctc" if tool.kind == "custom" else "fc", response_id, items)
        items.append(call_item(name, each["id"], tool, function["arguments"], status="completed"))
    return finish_response(in_progress, items, finish_reason=choice["finish_reason"], reply=reply)


def in_progress_response(body: Json, *, response_id: str, created_at: int, model: str, remaining: int | None) -> Json:
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
    return None if context_length is None or usage is None else context_length - usage["prompt_tokens"]


def item_id(kind: str, response_id: str, before: Sequence[Json]) -> str:
    """The id of the item that follows these, in the form of vLLM's: the same each time."""
    number = sum(item["id"].startswith(f"{kind}_") for item in before)
    return f"{kind}_{hashlib.blake2b(f'{response_id}/{kind}/{number}'.encode(), digest_size=8).hexdigest()}"


def text_part(text: str, logprobs: list[Json] | None) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(name: str, content: list[Json], *, status: str) -> Json:
    fields = {"type": "message", "id": name, "role": "assistant", "content": content}
    return {**fields, "status": status, "phase": None}


def reasoning_item(name: str, content: list[Json] | None, *, status: str | None) -> Json:
    fields = {"type": "reasoning", "id": name, "summary": [], "content": content}
    return {**fields, "encrypted_content": None, "status": status}


def call_item(item: str, call_id: str, tool: NamedTool, arguments: str, *, status: str) -> Json:
    called = {"id": item, "call_id": call_id, "name": tool.name, "namespace": tool.namespace}
    called |= {"async": None, "caller": None}
    if tool.kind == "custom":
        return {"type": "custom_tool_call", **called, "input": custom_input(arguments)}
    return {"type": "function_call", **called, "arguments": arguments, "status": status}


def logprobs_of(choice: Json) -> list[Json]:
    return (choice.get("logprobs") or {}).get("content") or []


def shows_reasoning(body: Json) -> bool:
    """Whether the client gets the reasoning, and log-probabilities, which would reveal it."""
    return body.get("include_reasoning") is not False


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one chunk adds to one item. Tool calls have a position, which separates two in a row."""

    kind: type["_Item"]
    text: str
    logprobs: list[Json] = field(default_factory=list)
    position: int | None = None
    call: Json = field(default_factory=dict)
    tool: NamedTool = _UNNAMED


class _Item(ABC):
    """An open item. Its events get their number, and the item's index in the output, from the stream."""

    prefix: ClassVar[str]

    def __init__(self, first: _Piece, name: str) -> None:
        self.first = first
        self.id = name
        self.text = ""
        self.logprobs: list[Json] = []

    def accepts(self, piece: _Piece) -> bool:
        return piece.kind is type(self) and piece.position == self.first.position

    def add(self, piece: _Piece) -> Iterator[Json]:
        self.text += piece.text
        self.logprobs += piece.logprobs
        yield from self.delta(piece)

    @abstractmethod
    def start_events(self) -> Iterator[Json]:
        """The events of its start."""

    @abstractmethod
    def delta(self, piece: _Piece) -> Iterator[Json]:
        """The events of a piece."""

    @abstractmethod
    def done(self) -> Json:
        """The item as it is at its end."""

    @abstractmethod
    def end_events(self) -> Iterator[Json]:
        """The events of its end, without the one that carries the whole item."""

    def event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, **fields}


class _Message(_Item):
    prefix = "msg"

    def start_events(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": message_item(self.id, [], status="in_progress")}
        yield self.event("content_part.added", content_index=0, part=text_part("", []))

    def delta(self, piece: _Piece) -> Iterator[Json]:
        logprobs = [  # a delta has them without bytes
            {
                "token": each["token"],
                "logprob": each["logprob"],
                "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in each["top_logprobs"]],
            }
            for each in piece.logprobs
        ]
        yield self.event("output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)

    def end_events(self) -> Iterator[Json]:
        yield self.event("output_text.done", content_index=0, text=self.text, logprobs=[])
        yield self.event("content_part.done", content_index=0, part=self._part())

    def done(self) -> Json:
        return message_item(self.id, [self._part()], status="completed")

    def _part(self) -> Json:
        return text_part(self.text, self.logprobs or None)


class _Reasoning(_Item):
    prefix = "rs"

    def start_events(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": reasoning_item(self.id, None, status="in_progress")}
        yield self.event("content_part.added", content_index=0, part=self._part())

    def delta(self, piece: _Piece) -> Iterator[Json]:
        yield self.event("reasoning_text.delta", content_index=0, delta=piece.text)

    def end_events(self) -> Iterator[Json]:
        yield self.event("reasoning_text.done", content_index=0, text=self.text)
        yield self.event("content_part.done", content_index=0, part=self._part())

    def done(self) -> Json:
        return reasoning_item(self.id, [self._part()], status="completed")

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    prefix = "fc"

    def start_events(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": self._call("in_progress")}

    def delta(self, piece: _Piece) -> Iterator[Json]:
        if piece.text:
            yield self.event("function_call_arguments.delta", delta=piece.text)

    def end_events(self) -> Iterator[Json]:
        name = self.first.call["function"]["name"]
        yield self.event("function_call_arguments.done", arguments=self.text, name=name)

    def done(self) -> Json:
        return self._call("completed")

    def _call(self, status: str) -> Json:
        return call_item(self.id, self.first.call["id"], self.first.tool, self.text, status=status)


class _CustomCall(_Call):
    prefix = "ctc"

    def delta(self, piece: _Piece) -> Iterator[Json]:
        # Its text can be read of the arguments when they are whole.
        yield from ()

    def end_events(self) -> Iterator[Json]:
        text = custom_input(self.text)
        yield self.event("custom_tool_call_input.delta", delta=text)
        yield self.event("custom_tool_call_input.done", input=text)


class ResponseStream:
    """One streamed response: the events for each chunk. The service's defaults belong into `body`."""

    def __init__(self, body: Json, *, response_id: str, created_at: int, context_length: int | None = None) -> None:
        self._body = body
        self._response_id = response_id
        self._created_at = created_at
        self._context_length = context_length
        self._in_progress: Json | None = None
        self._item: _Item | None = None
        self._tools, self._tool = named_tools(body), _UNNAMED
        self._output: list[Json] = []
        self._finish_reason: str | None = None
        self._last: Json = {}
        self._number = 0
        self._finished = False

    def add_chunk(self, chunk: Json) -> bytes:
        if self._finished:
            return b""
        events: list[Json] = []
        if self._in_progress is None:
            self._in_progress = in_progress_response(
                self._body,
                response_id=self._response_id,
                created_at=self._created_at,
                model=chunk.get("model") or self._body.get("model") or "",
                remaining=remaining_context(self._context_length, chunk.get("usage")),
            )
            events += (
                {"type": f"response.{kind}", "response": self._in_progress} for kind in ("created", "in_progress")
            )
        if "error" in chunk:
            error = chunk["error"]
            self._finished = True
            reason, code = str(error.get("message") or "the engine failed"), str(error.get("code") or "server_error")
            # Codex begins to compact by this code.
            failure = {"code": code if code == TOO_LONG else "server_error", "message": reason}
            response = {**self._in_progress, "status": "failed", "error": failure, "output": self._output}
            events.append({"type": "error", "code": code, "message": reason, "param": error.get("param")})
            events.append({"type": "response.failed", "response": response})
            return self._encode(events)
        self._last = chunk
        for choice in chunk["choices"]:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            for piece in self._pieces(choice):
                if self._item is None or not self._item.accepts(piece):
                    events += self._close_item()
                    self._item = piece.kind(piece, item_id(piece.kind.prefix, self._response_id, self._output))
                    events += self._with_output_index(self._item.start_events())
                events += self._with_output_index(self._item.add(piece))
        return self._encode(events)

    def end(self) -> bytes:
        if self._finished:
            return b""
        if self._in_progress is None or self._finish_reason is None or self._last.get("usage") is None:
            return self.add_chunk({"error": {"message": "the engine broke off its reply", "code": "engine_error"}})
        self._finished = True
        events = list(self._close_item())
        response = finish_response(self._in_progress, self._output, finish_reason=self._finish_reason, reply=self._last)
        # vLLM sends this event even for an incomplete response.
        events.append({"type": "response.completed", "response": response})
        return self._encode(events)

    def _pieces(self, choice: Json) -> Iterator[_Piece]:
        delta, shown = choice["delta"], shows_reasoning(self._body)
        if shown and delta.get("reasoning") is not None:
            yield _Piece(_Reasoning, delta["reasoning"])
        if delta.get("content"):
            logprobs = logprobs_of(choice) if shown and wants_logprobs(self._body) else []
            yield _Piece(_Message, delta["content"], logprobs)
        for call in delta.get("tool_calls") or ():
            if (function := call.get("function")) is not None:
                if name := function.get("name"):
                    self._tool = self._tools.get(name) or NamedTool("function", name, None)
                kind = _CustomCall if self._tool.kind == "custom" else _Call
                arguments = function.get("arguments") or ""
                yield _Piece(kind, arguments, position=call.get("index"), call=call, tool=self._tool)

    def _close_item(self) -> Iterator[Json]:
        if self._item is not None:
            item = self._item.done()
            yield from self._with_output_index(self._item.end_events())
            yield from self._with_output_index(iter([{"type": "response.output_item.done", "item": item}]))
            self._output.append(item)
            self._item = None

    def _with_output_index(self, events: Iterator[Json]) -> Iterator[Json]:
        for event in events:
            yield {**event, "output_index": len(self._output)}

    def _encode(self, events: list[Json]) -> bytes:
        encoded = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._number})
            encoded.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
            self._number += 1
        return b"".join(encoded)
