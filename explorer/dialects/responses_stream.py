"""Makes of a streamed chat completion the events that vLLM's own `/v1/responses` streams.

An item of the output is opened, added to and closed again; what the model says next decides which item is open.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from tuneloop.explorer.dialects.responses_reply import (
    call,
    finished,
    item_id,
    logprobs_of,
    message,
    outline,
    reasoning,
    room,
    shows_reasoning,
    text_part,
)
from tuneloop.explorer.dialects.responses_request import wants_logprobs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one chunk adds to one item. Calls have a position, by which two that follow each other differ."""

    kind: type["_Item"]
    text: str
    logprobs: list[Json] = field(default_factory=list)
    position: int | None = None
    call: Json = field(default_factory=dict)


class _Item(ABC):
    """An open item. Its events lack what the stream knows: their number, and the item's place in the output."""

    prefix: ClassVar[str]

    def __init__(self, first: _Piece, name: str) -> None:
        self.first = first
        self.id = name
        self.text = ""
        self.logprobs: list[Json] = []

    def takes(self, piece: _Piece) -> bool:
        """Whether the piece belongs to this item."""
        return piece.kind is type(self) and piece.position == self.first.position

    def added(self, piece: _Piece) -> Iterator[Json]:
        """The events of a piece, which is taken up."""
        self.text += piece.text
        self.logprobs += piece.logprobs
        yield from self.delta(piece)

    @abstractmethod
    def opened(self) -> Iterator[Json]:
        """The events of its beginning."""

    @abstractmethod
    def delta(self, piece: _Piece) -> Iterator[Json]:
        """The events of a piece."""

    @abstractmethod
    def done(self) -> Json:
        """The item as it is at its end."""

    @abstractmethod
    def closed(self) -> Iterator[Json]:
        """The events of its end, but for the one that carries it whole."""

    def event(self, kind: str, **told: Any) -> Json:
        """One of its events."""
        return {"type": f"response.{kind}", "item_id": self.id, **told}


class _Message(_Item):
    prefix = "msg"

    def opened(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": message(self.id, [], status="in_progress")}
        yield self.event("content_part.added", content_index=0, part=text_part("", []))

    def delta(self, piece: _Piece) -> Iterator[Json]:
        logprobs = [_brief(each) for each in piece.logprobs]
        yield self.event("output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)

    def closed(self) -> Iterator[Json]:
        yield self.event("output_text.done", content_index=0, text=self.text, logprobs=[])
        yield self.event("content_part.done", content_index=0, part=self._part())

    def done(self) -> Json:
        return message(self.id, [self._part()], status="completed")

    def _part(self) -> Json:
        return text_part(self.text, self.logprobs or None)


class _Reasoning(_Item):
    prefix = "rs"

    def opened(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": reasoning(self.id, None, status="in_progress")}
        yield self.event("content_part.added", content_index=0, part=self._part())

    def delta(self, piece: _Piece) -> Iterator[Json]:
        yield self.event("reasoning_text.delta", content_index=0, delta=piece.text)

    def closed(self) -> Iterator[Json]:
        yield self.event("reasoning_text.done", content_index=0, text=self.text)
        yield self.event("content_part.done", content_index=0, part=self._part())

    def done(self) -> Json:
        return reasoning(self.id, [self._part()], status="completed")

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    prefix = "fc"

    def opened(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "item": self._call("in_progress")}

    def delta(self, piece: _Piece) -> Iterator[Json]:
        if piece.text:
            yield self.event("function_call_arguments.delta", delta=piece.text)

    def closed(self) -> Iterator[Json]:
        name = self.first.call["function"]["name"]
        yield self.event("function_call_arguments.done", arguments=self.text, name=name)

    def done(self) -> Json:
        return self._call("completed")

    def _call(self, status: str) -> Json:
        told = self.first.call
        return call(self.id, told["id"], told["function"]["name"], self.text, status=status)


class ResponseStream:
    """One streamed response. It takes the chunks of the chat completion one by one and gives the events for each.

    `context` is the engine's longest sequence. What the service decides where clients don't say belongs into `body`.
    """

    def __init__(self, body: Json, *, response_id: str, created_at: int, context: int | None = None) -> None:
        self._body = body
        self._response_id = response_id
        self._created_at = created_at
        self._context = context
        self._begun: Json | None = None
        self._item: _Item | None = None
        self._output: list[Json] = []
        self._finish_reason: str | None = None
        self._last: Json = {}
        self._number = 0
        self._over = False

    def hear(self, chunk: Json) -> bytes:
        """The events of one chunk: none or several. A chunk that is an error ends the stream."""
        if self._over:
            return b""
        events = list(self._begin(chunk))
        if "error" in chunk:
            events += self._failed(chunk["error"])
        else:
            self._last = chunk
            for choice in chunk["choices"]:
                events += self._heard(choice)
        return self._told(events)

    def end(self) -> bytes:
        """The last events, when the engine has said that it is done. Nothing after a failure."""
        if self._over:
            return b""
        if self._begun is None or self._finish_reason is None or self._last.get("usage") is None:
            return self.hear({"error": {"message": "the engine broke off its reply", "code": "engine_error"}})
        self._over = True
        events = list(self._close())
        response = finished(self._begun, self._output, finish_reason=self._finish_reason, reply=self._last)
        # vLLM calls it completed even where the response says that it is not.
        events.append({"type": "response.completed", "response": response})
        return self._told(events)

    def _begin(self, chunk: Json) -> Iterator[Json]:
        if self._begun is None:
            self._begun = outline(
                self._body,
                response_id=self._response_id,
                created_at=self._created_at,
                model=chunk.get("model") or self._body.get("model") or "",
                room=room(self._context, chunk.get("usage")),
            )
            yield {"type": "response.created", "response": self._begun}
            yield {"type": "response.in_progress", "response": self._begun}

    def _heard(self, choice: Json) -> Iterator[Json]:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        for piece in self._pieces(choice):
            if self._item is None or not self._item.takes(piece):
                yield from self._close()
                self._item = piece.kind(piece, item_id(piece.kind.prefix, self._response_id, self._output))
                yield from self._placed(self._item.opened())
            yield from self._placed(self._item.added(piece))

    def _pieces(self, choice: Json) -> Iterator[_Piece]:
        said, shown = choice["delta"], shows_reasoning(self._body)
        if shown and said.get("reasoning") is not None:
            yield _Piece(_Reasoning, said["reasoning"])
        if said.get("content"):
            logprobs = logprobs_of(choice) if shown and wants_logprobs(self._body) else []
            yield _Piece(_Message, said["content"], logprobs)
        for told in said.get("tool_calls") or ():
            if (function := told.get("function")) is not None:
                yield _Piece(_Call, function.get("arguments") or "", position=told.get("index"), call=told)

    def _close(self) -> Iterator[Json]:
        if self._item is not None:
            item = self._item.done()
            yield from self._placed(self._item.closed())
            yield from self._placed(iter([{"type": "response.output_item.done", "item": item}]))
            self._output.append(item)
            self._item = None

    def _placed(self, events: Iterator[Json]) -> Iterator[Json]:
        for event in events:
            yield {**event, "output_index": len(self._output)}

    def _failed(self, error: Json) -> Iterator[Json]:
        self._over = True
        reason = str(error.get("message") or "the engine failed")
        code = str(error.get("code") or "server_error")
        yield {"type": "error", "code": code, "message": reason, "param": error.get("param")}
        failure = {"code": "server_error", "message": reason}
        response = {**(self._begun or {}), "status": "failed", "error": failure, "output": self._output}
        yield {"type": "response.failed", "response": response}

    def _told(self, events: list[Json]) -> bytes:
        said = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._number})
            said.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
            self._number += 1
        return b"".join(said)


def _brief(logprob: Json) -> Json:
    """A token's log-probability as a delta tells it: without bytes."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": top}
