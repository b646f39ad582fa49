"""Translates a streamed chat completion into the events of a streamed Anthropic message, as vLLM itself does it."""

from collections.abc import Iterator
from typing import Any

import orjson

from tuneloop.explorer.dialects.messages import stop_reason_of, thinking_signature, to_usage
from tuneloop.explorer.http.errors import anthropic_error

Json = dict[str, Any]


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
        """The events for one chat.completion.chunk."""
        return b"" if self._broken else b"".join(self._events(chunk))

    def end(self) -> bytes:
        """The last events, after the engine's [DONE]."""
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
