"""An engine double with its own `/v1/responses`, which answers as vLLM 0.32 does, but for the words.

It samples nothing: a background response goes on until a test says that it is over.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tests.doubles.engine import MODEL, EngineDouble

Json = dict[str, Any]

RESPONSES = "/v1/responses"

#: With these the double refuses, as vLLM does.
_NO_STORE = "background can only be used when `store` is true (parameter=background)"


@dataclass
class RespondingDouble(EngineDouble):
    """An engine whose own route answers too."""

    #: What the next responses say.
    output: list[Json] = field(default_factory=lambda: [message_item("Done.")])
    status_of_output: str = "completed"
    #: Streams end after so many events, without a last one.
    breaks_after: int | None = None
    fails: bool = False  # requests for a stored response are answered with 500

    native_requests: list[Json] = field(default_factory=list)
    held: dict[str, Json] = field(default_factory=dict)

    def finish(self, response_id: str, status: str = "completed") -> None:
        """End a background response."""
        self.held[response_id] |= {"status": status, "output": self.output}

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        path = scope["path"]
        if not path.startswith(RESPONSES):
            return await super()._answer(scope, body, send)
        if self.fails:
            return await _send_json(send, 500, {"detail": "no"})
        if path == RESPONSES:
            return await self._respond(json.loads(body), send)
        name, _, verb = path.removeprefix(f"{RESPONSES}/").partition("/")
        if name not in self.held:
            return await _send_json(send, 404, refused(f"Response with id '{name}' not found.", 404))
        if verb == "cancel":
            return await self._cancel(self.held[name], send)
        if b"stream=true" in scope["query_string"]:
            after = parse_qs(scope["query_string"].decode()).get("starting_after", ["-1"])
            return await self._events(self.held[name], send, int(after[0]))
        await _send_json(send, 200, self.held[name])

    async def _respond(self, request: Json, send: Any) -> None:
        self.native_requests.append(request)
        background = request.get("background") is True
        if background and not request.get("store", True):
            return await _send_json(send, 400, refused(_NO_STORE, 400, "background"))
        response = response_object(request, "queued" if background else self.status_of_output)
        if not background:
            response["output"] = self.output
        if background or request.get("store", True):
            self.held[response["id"]] = response
        if request.get("stream"):
            return await self._events(response, send)
        await _send_json(send, 200, response)

    async def _cancel(self, response: Json, send: Any) -> None:
        if response["status"] not in ("queued", "in_progress"):
            return await _send_json(send, 400, refused("Cannot cancel a synchronous response.", 400))
        response["status"] = "cancelled"
        await _send_json(send, 200, response)

    async def _events(self, response: Json, send: Any, after: int = -1) -> None:
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
            if number > after:
                await _say(send, event | {"sequence_number": number})
        if self.breaks_after is not None:
            raise ConnectionAbortedError
        while response["status"] in ("queued", "in_progress"):  # noqa: ASYNC110 - a test changes it
            await asyncio.sleep(0.005)
        if after >= len(events):
            await asyncio.Event().wait()
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
        "background": request.get("background") is True,
        "tools": request.get("tools") or [],
        "usage": None,
        **{name: request.get(name) for name in echoed},
    }


def refused(message: str, code: int, param: str = "response_id") -> Json:
    """A refusal in vLLM's envelope."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


async def _say(send: Any, event: Json) -> None:
    data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
    await send({"type": "http.response.body", "body": data.encode(), "more_body": True})


async def _send_json(send: Any, status: int, answer: Json) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
