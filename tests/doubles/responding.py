"""An engine double with its own `/v1/responses`, which answers as vLLM 0.32 does, but for the words."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.engine import MODEL, EngineDouble

Json = dict[str, Any]

RESPONSES = "/v1/responses"


@dataclass
class RespondingDouble(EngineDouble):
    """An engine whose own route answers too."""

    #: What the next responses say.
    output: list[Json] = field(default_factory=lambda: [message_item("Done.")])
    status_of_output: str = "completed"
    #: Streams end after so many events, without a last one.
    breaks_after: int | None = None

    native_requests: list[Json] = field(default_factory=list)

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        path = scope["path"]
        if path != RESPONSES:
            return await super()._answer(scope, body, send)
        request = json.loads(body)
        self.native_requests.append(request)
        response = response_object(request, self.status_of_output) | {"output": self.output}
        if request.get("stream"):
            return await self._events(response, send)
        await _send_json(send, 200, response)

    async def _events(self, response: Json, send: Any) -> None:
        begun = {**response, "status": "in_progress", "output": []}
        events: list[Json] = [{"type": "response.created", "response": begun}]
        events += [
            {"type": "response.output_text.delta", "delta": part["text"], "item_id": item["id"]}
            for item in self.output
            for part in item.get("content", ())
        ]
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        await send(start)
        for number, event in enumerate(events):
            if number == self.breaks_after:
                raise ConnectionAbortedError
            await _say(send, event | {"sequence_number": number})
        if self.breaks_after is not None:
            raise ConnectionAbortedError
        kind = "response.failed" if response["status"] == "failed" else "response.completed"
        await _say(send, {"type": kind, "response": response, "sequence_number": len(events)})
        await send({"type": "http.response.body"})


def message_item(text: str) -> Json:
    """An item of words."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    item = {"type": "message", "id": "msg_0123456789abcdef", "role": "assistant", "content": [part]}
    return {**item, "status": "completed", "phase": None}


def response_object(request: Json, status: str) -> Json:
    """A response object."""
    echoed = ("metadata", "previous_response_id", "instructions", "user")
    return {
        "id": request.get("request_id", "resp_own"),
        "object": "response",
        "created_at": 1,
        "model": MODEL,
        "status": status,
        "output": [],
        "background": False,
        "tools": request.get("tools") or [],
        "usage": None,
        **{name: request.get(name) for name in echoed},
    }


async def _say(send: Any, event: Json) -> None:
    data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
    await send({"type": "http.response.body", "body": data.encode(), "more_body": True})


async def _send_json(send: Any, status: int, answer: Json) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
