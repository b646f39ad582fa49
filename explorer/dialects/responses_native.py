"""Responses that a chat completion cannot express: the engine's own `/v1/responses` answers them.

It returns no token ids, so only the text of their replies is recorded. The engine uses our id for the reply, so that
feedback and later requests for it find it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tuneloop.explorer.auth import Caller
from tuneloop.explorer.dialects.dialect import RESPONSES, Dialect, ReadConversation, ReplyWriter
from tuneloop.explorer.dialects.responses_request import refuse_unsupported
from tuneloop.explorer.transcript import CapturedChoice, RequestedFields, Transcript
from tuneloop.shared.errors import EngineError, RequestRefused
from tuneloop.shared.ledger.recording.stored_completions import metadata_as_text

Json = dict[str, Any]

#: The statuses of a response that is not finished.
_UNFINISHED = ("queued", "in_progress")

#: The last event of a stream is one of these.
_FINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed", "error")


class NativeResponseTranscript(Transcript):
    """A response of the engine's own route. It has no choice before it is finished."""

    def __init__(self, msg_id: str, body: Json) -> None:
        super().__init__(msg_id, RequestedFields())
        self._body = body
        #: The last state of the response.
        self.latest: Json = {"id": msg_id, "object": "response", "output": []}

    def _feed(self, piece: bytes) -> bytes:
        try:
            return orjson.dumps(self.update(orjson.loads(piece)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's response cannot be read: {error!r}") from error

    def update(self, response: Json) -> Json:
        # The client's own value of the fields that were changed for the engine.
        changed = ("model", "previous_response_id", "metadata", "instructions")
        self.latest = response | {name: self._body[name] for name in changed if self._body.get(name) is not None}
        if response["status"] not in _UNFINISHED:
            usage = response.get("usage")
            if isinstance(usage, Mapping) and isinstance(total := usage.get("total_tokens"), int):
                self.reported_tokens = max(self.reported_tokens, total)
            self.broken = response["status"] == "failed"
            output = response["output"]
            parts = [part for item in output if item["type"] == "message" for part in item["content"]]
            calls = [item for item in output if item["type"] == "function_call"]
            finish_reason = "tool_calls" if calls else "stop"
            self.choices[0] = CapturedChoice(
                text=[part["text"] for part in parts if part["type"] == "output_text"],
                tool_calls={
                    number: {
                        "id": item["call_id"],
                        "type": "function",
                        "function": {"name": item["name"], "arguments": item["arguments"]},
                    }
                    for number, item in enumerate(calls)
                },
                finish_reason={"completed": finish_reason, "incomplete": "length"}.get(response["status"]),
            )
        return self.latest

    def add_text(self, text: str) -> None:
        self.choices.setdefault(0, CapturedChoice()).text.append(text)

    def mark_broken(self) -> None:
        self.broken = True
        self.choices.setdefault(0, CapturedChoice())


class NativeReplyWriter(ReplyWriter):
    def __init__(self, body: Json, msg_id: str) -> None:
        self._response = NativeResponseTranscript(msg_id, body)
        super().__init__(self._response)
        self._final_event = b""
        self._number = 0

    def convert_event(self, event: bytes) -> bytes:
        """See ReplyWriter. The last event waits until the reply is recorded."""
        name, _, data = event.partition(b"\ndata: ")
        if not data:
            return super().convert_event(event)
        payload = orjson.loads(data)
        kind = payload["type"]
        self._number = payload.get("sequence_number", self._number) + 1
        if kind == "response.output_text.delta":
            self._response.add_text(payload["delta"])
        if isinstance(payload.get("response"), dict):
            payload["response"] = self._response.update(payload["response"])
            data = orjson.dumps(payload)
        converted = b"%b\ndata: %b\n\n" % (name, data)
        if kind not in _FINAL_EVENTS:
            return converted
        if kind in ("error", "response.failed"):
            self._response.mark_broken()
        self.done, self._final_event = True, converted
        return b""

    def finish(self) -> bytes:
        return self._final_event

    def error_event(self, message: str, code: str) -> bytes:
        error = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": self._number}
        failure = {"code": "server_error", "message": message}
        response = {**self._response.latest, "status": "failed", "error": failure}
        failed = {"type": "response.failed", "response": response, "sequence_number": self._number + 1}
        events = orjson.dumps(error), orjson.dumps(failed)
        return b"event: error\ndata: %b\n\nevent: response.failed\ndata: %b\n\n" % events


class NativeResponsesDialect(Dialect):
    """OpenAI's responses, as the engine's own route answers them; `defaults` fill the client's empty fields."""

    path, prefix = RESPONSES, "resp_"
    upstream_path, upstream_prefix = RESPONSES, "resp_"
    length_field = None

    def __init__(self, read_conversation: ReadConversation, *, defaults: Mapping[str, object]) -> None:
        self._read_conversation = read_conversation
        self._defaults = defaults

    async def to_upstream(self, body: Json, caller: Caller) -> Json:
        """See Dialect. The previous conversation is sent in full: the engine may not have it."""
        refuse_unsupported(body)
        defaults = {key: value for key, value in self._defaults.items() if value is not None and body.get(key) is None}
        upstream = body | defaults
        previous_id = upstream.get("previous_response_id")
        if not isinstance(previous_id, str):
            return upstream
        if upstream.get("previous_input_messages"):
            message = "Only one of `previous_input_messages` and `previous_response_id` can be set."
            raise RequestRefused(message, code="invalid_value", param="previous_response_id")
        del upstream["previous_response_id"]
        input_field = upstream.get("input")
        if isinstance(input_field, str | list):
            items = input_field if isinstance(input_field, list) else [{"role": "user", "content": input_field}]
            upstream["input"] = [*input_items(await self._read_conversation(previous_id, caller)), *items]
        return upstream

    def verbatim(self, upstream: Json, msg_id: str) -> Json:
        fields = {**upstream, "request_id": msg_id, "store": False}  # the engine would keep the response for ever
        if isinstance(upstream.get("metadata"), dict):
            fields["metadata"] = metadata_as_text(upstream["metadata"])  # the engine takes strings only
        return fields

    def writer(self, body: Json, msg_id: str, upstream_id: str) -> ReplyWriter:
        return NativeReplyWriter(body, msg_id)


def input_items(messages: Sequence[Json]) -> list[Json]:
    items: list[Json] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            call_id = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": _parts(content)})
        elif role != "assistant":
            items.append({"role": role, "content": _parts(content)})
        else:
            if message.get("reasoning") is not None:
                thought = {"type": "reasoning_text", "text": message["reasoning"]}
                items.append({"type": "reasoning", "summary": [], "content": [thought]})
            if content is not None:
                items.append({"role": role, "content": content})
            for call in message.get("tool_calls") or ():
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part["type"] == "image_url":
            image = part["image_url"]
            parts.append({"type": "input_image", "image_url": image["url"], "detail": image["detail"]})
        else:
            parts.append({"type": "input_text", "text": part["text"]})
    return parts
