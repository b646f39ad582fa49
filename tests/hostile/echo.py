"""An engine double that answers with the ids planted in its prompt, so that a mixed-up reply is seen by its content.

`python -m tests.hostile.echo PORT` serves it as a process, which can be killed.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from tests.doubles.engine import MODEL, EngineDouble
from tests.doubles.serving import Resettable
from tests.explorer.running import eventually
from tests.loop.harness.services import free_port

Json = dict[str, Any]

TEXT = "/v1/completions"

_PLANTED = re.compile(r"id=(\w+)")


def planted(name: str) -> str:
    """A prompt whose reply says `name`."""
    return f"please say id={name}"


def reply_to(*names: str) -> str:
    """What the reply to a conversation with these ids says."""
    return " ".join(("echo", *names))


def ids_in(prompt: object) -> list[str]:
    """The ids planted in a prompt, a list of messages or of texts, in their order."""
    if isinstance(prompt, str):
        return _PLANTED.findall(prompt)
    if isinstance(prompt, dict):
        return ids_in(prompt.get("content")) if "content" in prompt else ids_in(prompt.get("text"))
    return [name for each in prompt for name in ids_in(each)] if isinstance(prompt, list) else []


@dataclass
class EchoDouble(EngineDouble):
    """Answers chats and texts, whole and streamed; `asked` has the planted ids, as often as they came."""

    asked: list[str] = field(default_factory=list)
    keeps_asked: bool = True

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        if scope["path"] == TEXT and not _is_probe(json.loads(body)):
            return await self._reply(json.loads(body), scope, send)
        await super()._answer(scope, body, send)

    async def _chat(self, scope: Any, body: bytes, send: Any) -> None:
        request = json.loads(body)
        if not isinstance(request.get("messages"), list) or not request["messages"]:
            return await _send(send, 400, {"error": {"message": "no messages", "type": "BadRequestError", "code": 400}})
        await self._reply(request, scope, send)

    async def _reply(self, request: Json, scope: Any, send: Any) -> None:
        if request.get("model") not in {MODEL, *self.adapters}:
            return await _send(send, 404, {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}})
        if request.get("prompt", "x") in ("", [], None):
            return await _send(send, 400, {"error": {"message": "no prompt", "type": "BadRequestError", "code": 400}})
        names = ids_in(request.get("messages", request.get("prompt")))
        if self.keeps_asked:
            self.asked += names
        while self.paused or self.hangs:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)
        headers = dict(scope["headers"])
        reply = _Reply(request, names, headers.get(b"x-request-id", b"own").decode())
        if not request.get("stream"):
            await asyncio.sleep(self.piece_pause_s)
            return await _send(send, 200, reply.whole())
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for piece in reply.pieces():
            await asyncio.sleep(self.piece_pause_s)
            event = b"data: %b\n\n" % json.dumps(piece).encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class _Reply:
    """One reply, a token for each word."""

    def __init__(self, request: Json, names: list[str], request_id: str) -> None:
        self._chat = "messages" in request
        self._words = re.findall(r"\S+\s*", reply_to(*names))
        self._request = request
        self._usage = {"prompt_tokens": 2, "completion_tokens": len(self._words), "total_tokens": 2 + len(self._words)}
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "created": 1,
            "model": request["model"],
        }

    def whole(self) -> Json:
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, self._words, "stop", whole=True) for index in range(self._choices())]
        prompt = {"prompt_token_ids": [1, 2]} if self._chat and self._request.get("return_token_ids") else {}
        return self._head | {"object": kind, "choices": choices, "usage": self._usage} | prompt

    def pieces(self) -> list[Json]:
        kind = {"object": "chat.completion.chunk" if self._chat else "text_completion"}
        found: list[Json] = []
        if self._chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            prompt = {"prompt_token_ids": [1, 2]} if self._request.get("return_token_ids") else {}
            found += [{"choices": [first | {"index": index}]} | prompt for index in range(self._choices())]
        for number, word in enumerate(self._words, start=1):
            reason = "stop" if number == len(self._words) else None
            found += [{"choices": [self._choice(index, [word], reason)]} for index in range(self._choices())]
        if (self._request.get("stream_options") or {}).get("include_usage"):
            found.append({"choices": [], "usage": self._usage})
        return [self._head | kind | piece for piece in found]

    def _choices(self) -> int:
        n, prompt = self._request.get("n"), self._request.get("prompt")
        texts = len(prompt) if isinstance(prompt, list) and all(isinstance(each, str) for each in prompt) else 1
        return (n if isinstance(n, int) else 1) * texts

    def _choice(self, index: int, words: list[str], reason: str | None, *, whole: bool = False) -> Json:
        text, choice = "".join(words), {"index": index, "finish_reason": reason, "logprobs": None}
        if self._request.get("return_token_ids"):
            choice["token_ids"] = list(range(10, 10 + len(words)))
            choice |= {} if self._chat else {"prompt_token_ids": [1, 2]}
        if self._chat:
            if self._request.get("logprobs"):
                tokens = [{"token": word, "logprob": -1.0, "bytes": [], "top_logprobs": []} for word in words]
                choice["logprobs"] = {"content": tokens}
            return choice | {"message" if whole else "delta": {"role": "assistant", "content": text}}
        if self._request.get("logprobs") is not None:
            ours = {"tokens": words, "token_logprobs": [-1.0] * len(words)}
            choice["logprobs"] = ours | {"top_logprobs": [], "text_offset": []}
        return choice | {"text": text}


def _is_probe(request: Json) -> bool:
    """Whether the explorer asks for itself."""
    prompt = request.get("prompt")
    numbers = isinstance(prompt, list) and bool(prompt) and all(isinstance(each, int) for each in prompt)
    return numbers or "prompt_logprobs" in request or (prompt, request.get("top_k")) == ("a", 1)


async def _send(send: Any, status: int, answer: Json) -> None:
    data = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def listens(port: int) -> bool:
    """Whether somebody answers at a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def echo_process(folder: Path, port: int | None = None, *, pause_s: float = 0.0) -> Iterator[str]:
    """The URL of a double in a process of its own, which pauses so long before each reply or piece."""
    port = port or free_port()
    with (folder / "echo.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.hostile.echo", str(port), str(pause_s)]
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: listens(port), within_s=600)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


if __name__ == "__main__":
    uvicorn.run(
        EchoDouble(answers_probes_by_manifest=True, keeps_asked=False, piece_pause_s=float(sys.argv[2])),
        port=int(sys.argv[1]),
        log_level="error",
        http=Resettable,
    )
