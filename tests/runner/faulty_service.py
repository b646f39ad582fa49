"""A service in miniature that fails some requests for replies, as a test wants."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.serving import reset
from tests.runner.tuning.service_double import MODEL, Json, ServiceDouble

#: A failure: the status of an answer, or what becomes of the connection or the stream.
Failure = int | str

FAILURES: list[Failure] = [429, 502, 503, 504, "refused", "half a body", "cut stream", "error event"]

_HALF = b'data: {"id": "chatcmpl-x", "object": "chat.completion.chunk", "choices": []}\n\n'
_ERROR = b'data: {"error": {"message": "the engine broke off its reply", "code": "engine_error"}}\n\n'


@dataclass
class FaultyService(ServiceDouble):
    """`fails` says of a question, and how often it was asked before, what becomes of the request; None: a reply."""

    fails: Callable[[str, int], Failure | None] = lambda question, before: None
    asked: list[str] = field(default_factory=list)

    async def __call__(self, scope: Json, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            return await super().__call__(scope, receive, send)
        message = await receive()
        body = json.loads(message["body"])
        question = body["messages"][-1]["content"]
        failure = self.fails(question, self.asked.count(question))
        self.asked.append(question)

        async def again() -> Any:
            return message

        if failure is not None:
            await _fail(failure, scope, send)
        elif body.get("stream"):
            await super().__call__(scope, again, _Streaming(send))
        else:
            await super().__call__(scope, again, send)


@dataclass
class _Streaming:
    """Sends a whole reply as a stream of one chunk."""

    send: Any

    async def __call__(self, message: Json) -> None:
        if message["type"] == "http.response.start":
            headers = [each for each in message["headers"] if each[0] != b"content-type"]
            return await self.send(message | {"headers": [*headers, (b"content-type", b"text/event-stream")]})
        reply = json.loads(message["body"])
        delta = {"index": 0, "finish_reason": "stop", "delta": reply["choices"][0]["message"]}
        chunk = json.dumps(reply | {"object": "chat.completion.chunk", "choices": [delta]}).encode()
        await self.send(message | {"body": b"data: %b\n\ndata: [DONE]\n\n" % chunk})


async def _fail(failure: Failure, scope: Json, send: Any) -> None:
    if failure == "refused":
        return reset(scope)
    status, kind, body, length = 200, b"text/event-stream", _HALF, None
    if isinstance(failure, int):
        status, kind, body = failure, b"application/json", b'{"error": {"message": "not now"}}'
    elif failure == "half a body":
        kind, body, length = b"application/json", b'{"id":', b"100"
    elif failure == "error event":
        body += _ERROR
    headers = [(b"content-type", kind), (b"retry-after-ms", b"1")]
    headers += [(b"content-length", length)] if length else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": length is not None})
    if length is not None:
        reset(scope)


async def ask(question: str, model: Any, *, stream: bool, retries: int = 0) -> str:
    """What a client that is read to its end makes of a reply."""
    completions = model.with_options(max_retries=retries).chat.completions
    asked = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
    if not stream:
        return (await completions.create(**asked)).choices[0].message.content or ""
    pieces = [each async for each in await completions.create(**asked, stream=True)]
    return "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
