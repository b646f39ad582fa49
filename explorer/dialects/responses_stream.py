"""Translates a streamed chat completion into the events of vLLM's own `/v1/responses`.

An item of the output is started, added to and ended; the type of the next delta decides which item is open.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from tuneloop.explorer.dialects.responses_reply import (
    finish_response,
    function_call_item,
    in_progress_response,
    item_id,
    logprobs_of,
    message_item,
    reasoning_item,
    remaining_context,
    shows_reasoning,
    text_part,
)
from tuneloop.explorer.dialects.responses_request import wants_logprobs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one chunk adds to one item. Tool calls have a position, which separates two in a row."""

    kind: type["_Item"]
    text: str
    logprobs: list[Json] = field(default_factory=list)
    position: int | None = None
    call: Json = field(default_factory=dict)


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
        call = self.first.call
        return function_call_item(self.id, call["id"], call["function"]["name"], self.text, status=status)


class ResponseStream:
    """One streamed response. It takes the chunks of the chat completion one by one and returns the events for each.

    `context_length` is the engine's. The service's defaults belong into `body`.
    """

    def __init__(self, body: Json, *, response_id: str, created_at: int, context_length: int | None = None) -> None:
        self._body = body
        self._response_id = response_id
        self._created_at = created_at
        self._context_length = context_length
        self._in_progress: Json | None = None
        self._item: _Item | None = None
        self._output: list[Json] = []
        self._finish_reason: str | None = None
        self._last: Json = {}
        self._number = 0
        self._finished = False

    def add_chunk(self, chunk: Json) -> bytes:
        """The events of one chunk: none or several. A chunk that is an error ends the stream."""
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
            failure = {"code": "server_error", "message": reason}
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
        """The last events, after the engine's [DONE]. Nothing after a failure."""
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
                yield _Piece(_Call, function.get("arguments") or "", position=call.get("index"), call=call)

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
