"""Requests for responses that cannot be put as chat completions: the engine's own `/v1/responses` answers them.

It tells no token ids, so what is kept of them is only words. The engine calls the reply by our name, so that feedback,
and whoever asks for it later, finds it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from tuneloop.explorer.capture.transcript import CapturedChoice, RequestedFields, Transcript
from tuneloop.explorer.dialects.dialect import RESPONSES, Dialect, ReplyWriter
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.ledger.recording.completion_object import shown

Json = dict[str, Any]

#: What a response may still be.
UNDER_WAY = ("queued", "in_progress")

#: Events after which nothing comes.
_LAST = ("response.completed", "response.incomplete", "response.failed", "error")


class NativeResponseTranscript(Transcript):
    """A response that an engine tells as it is. There is no choice of one that is still under way."""

    def __init__(self, msg_id: str, body: Json, *, background: bool) -> None:
        super().__init__(msg_id, RequestedFields())
        self._body = body
        self._background = background
        #: The response as it was told last.
        self.told: Json = {"id": msg_id, "object": "response", "output": []}

    def _feed(self, piece: bytes) -> bytes:
        try:
            return orjson.dumps(self.settle(orjson.loads(piece)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's response cannot be read: {error!r}") from error

    def settle(self, response: Json) -> Json:
        """Take down a response as it stands; as the client gets it."""
        self.told = as_asked(self._body, response)
        if response["status"] not in UNDER_WAY:
            self.broken = False
            self.choices[0] = _choice(response)
        return self.told

    def hear_words(self, words: str) -> None:
        """Take down a part of the text, for the case that no more comes."""
        if not self._background:
            self.choices.setdefault(0, CapturedChoice()).text.append(words)

    def lose(self) -> None:
        """Nothing more will be heard of it."""
        self.broken = True
        self.choices.setdefault(0, CapturedChoice())


class NativeReplyWriter(ReplyWriter):
    """Tells a response as the engine tells it."""

    def __init__(self, body: Json, msg_id: str) -> None:
        self._response = NativeResponseTranscript(msg_id, body, background=body.get("background") is True)
        super().__init__(self._response)
        self._background = body.get("background") is True
        self._end = b""
        self._number = 0

    @property
    def unfinished(self) -> bool:
        """See Teller."""
        return self._background and not self._response.choices

    def event(self, event: bytes) -> bytes:
        """See Teller. The last event waits until the reply is kept."""
        name, _, data = event.partition(b"\ndata: ")
        if not data:
            return super().event(event)
        told = orjson.loads(data)
        kind = told["type"]
        self._number = told.get("sequence_number", self._number) + 1
        if kind == "response.output_text.delta":
            self._response.hear_words(told["delta"])
        if isinstance(told.get("response"), dict):
            told["response"] = self._response.settle(told["response"])
            data = orjson.dumps(told)
        said = b"%b\ndata: %b\n\n" % (name, data)
        if kind not in _LAST:
            return said
        if kind in ("error", "response.failed"):
            self._response.lose()
        self.done, self._end = True, said
        return b""

    def last(self) -> bytes:
        """See Teller."""
        return self._end

    def broken(self, message: str, code: str) -> bytes:
        """See Teller."""
        error = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": self._number}
        failure = {"code": "server_error", "message": message}
        response = {**self._response.told, "status": "failed", "error": failure}
        failed = {"type": "response.failed", "response": response, "sequence_number": self._number + 1}
        said = orjson.dumps(error), orjson.dumps(failed)
        return b"event: error\ndata: %b\n\nevent: response.failed\ndata: %b\n\n" % said


class NativeResponsesDialect(Dialect):
    """OpenAI's responses, as the engine answers them itself.

    `conversation` gives the chat messages up to the response of a name; `defaults` is said where clients don't say.
    """

    path, prefix = RESPONSES, "resp_"
    upstream_path, upstream_prefix = RESPONSES, "resp_"
    length = None

    def __init__(
        self, conversation: Callable[[str], Awaitable[Sequence[Json]]], *, defaults: Mapping[str, object]
    ) -> None:
        self._conversation = conversation
        self._defaults = defaults

    async def asked(self, body: Json) -> Json:
        """See Dialect. What a response goes on from is said in full: the engine may not have it."""
        unsaid = {key: value for key, value in self._defaults.items() if value is not None and body.get(key) is None}
        asked = body | unsaid
        continued = asked.get("previous_response_id")
        if not isinstance(continued, str):
            return asked
        if asked.get("previous_input_messages"):
            message = "Only one of `previous_input_messages` and `previous_response_id` can be set."
            raise RequestRefused(message, code="invalid_value", param="previous_response_id")
        del asked["previous_response_id"]
        said = asked.get("input")
        if isinstance(said, str | list):
            items = said if isinstance(said, list) else [{"role": "user", "content": said}]
            asked["input"] = [*as_items(await self._conversation(continued)), *items]
        return asked

    def verbatim(self, asked: Json, msg_id: str) -> Json:
        """See Dialect."""
        said = {**asked, "request_id": msg_id}
        if isinstance(asked.get("metadata"), dict):
            said["metadata"] = shown(asked["metadata"])  # the engine takes strings only
        if not asked.get("background"):
            said["store"] = False  # it would never forget it
        return said

    def teller(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        """See Dialect."""
        return NativeReplyWriter(body, msg_id)


def as_asked(body: Json, response: Json) -> Json:
    """An engine's response with what the client said, where the engine was told it in another way."""
    said = {name: body[name] for name in ("previous_response_id", "metadata") if body.get(name) is not None}
    return response | said


def as_items(messages: Sequence[Json]) -> list[Json]:
    """Chat messages, as `responses_request` makes them, as the items of an input."""
    return [item for message in messages for item in _items(message)]


def _items(message: Json) -> list[Json]:
    content = message.get("content")
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": _parts(content)}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": _parts(content)}]
    items: list[Json] = []
    if message.get("reasoning") is not None:
        thought = {"type": "reasoning_text", "text": message["reasoning"]}
        items.append({"type": "reasoning", "summary": [], "content": [thought]})
    if content is not None:
        items.append({"role": "assistant", "content": content})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _parts(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Json) -> Json:
    if part["type"] == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image["detail"]}
    return {"type": "input_text", "text": part["text"]}


def _choice(response: Json) -> CapturedChoice:
    output = response["output"]
    spoken = [part for item in output if item["type"] == "message" for part in item["content"]]
    calls = [item for item in output if item["type"] == "function_call"]
    over = "tool_calls" if calls else "stop"
    return CapturedChoice(
        text=[part["text"] for part in spoken if part["type"] == "output_text"],
        tool_calls={number: _call(item) for number, item in enumerate(calls)},
        finish_reason={"completed": over, "incomplete": "length"}.get(response["status"]),
    )


def _call(item: Json) -> Json:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
