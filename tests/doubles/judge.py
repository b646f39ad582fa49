"""A model that judges, on OpenAI's wire: what it says is what a test tells it to, in turn; the last one for ever."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.serving import serving

Said = str | dict[str, Any] | Callable[[dict[str, Any]], Any]


@dataclass
class JudgeDouble:
    """One judge. `says` are what it writes; `answers` come first: (status, body, headers) instead of a completion."""

    url: str = ""
    says: list[Said] = field(default_factory=lambda: [verdict(4)])
    answers: list[tuple[int, Any, dict[str, str]]] = field(default_factory=list)
    finish_reason: str = "stop"
    pause_s: float = 0.0
    byte_pause_s: float = 0.0  # before each byte
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: set[object] = field(default_factory=set)
    most_at_once: int = 0

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await _lifespan(receive, send)
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        assert (scope["method"], scope["path"]) == ("POST", "/v1/chat/completions")
        self.headers.append({key.decode(): value.decode() for key, value in scope["headers"]})
        self.requests.append(json.loads(body))
        request, at_once = object(), self.at_once  # a restarted judge does not count the requests of the one before
        at_once.add(request)
        self.most_at_once = max(self.most_at_once, len(at_once))
        try:
            status, reply, headers = self._answer(self.requests[-1])
            await asyncio.sleep(self.pause_s)
        finally:
            at_once.remove(request)
        await _send_reply(send, status, reply, headers, self.byte_pause_s)

    def _answer(self, request: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if self.answers:
            return self.answers.pop(0)
        reply = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        text = reply(request) if callable(reply) else reply
        text = text if isinstance(text, str) else json.dumps(text)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self.finish_reason}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        return 200, {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}, {}


def verdict(*scores: float, reason: str = "because", names: str = "relevance accuracy completeness") -> dict[str, Any]:
    """What a judge writes: the scores of the criteria in turn, the last one for those left."""
    by_name = {name: scores[min(at, len(scores) - 1)] for at, name in enumerate(names.split())}
    return {"reason": reason, "scores": by_name}


def shown(request: dict[str, Any]) -> str:
    """What the judge was shown."""
    found: str = request["messages"][1]["content"]
    return found


@contextmanager
def judge_place() -> Iterator[JudgeDouble]:
    """A judge, up until the block ends."""
    judge = JudgeDouble()
    with serving(judge) as judge.url:
        yield judge


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _send_reply(send: Any, status: int, reply: Any, headers: dict[str, str], byte_pause_s: float) -> None:
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    more = [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain"), *more]})
    if byte_pause_s:
        for at in range(len(body)):
            await asyncio.sleep(byte_pause_s)
            await send({"type": "http.response.body", "body": body[at : at + 1], "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})
