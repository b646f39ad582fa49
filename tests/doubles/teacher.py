"""A teacher behind an endpoint, as vLLM answers: token ids in, their log-probabilities out. Faults are attributes."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from tests.doubles.serving import serving


def logprob_of(ids: list[int], at: int) -> float:
    """What it says of the token at a position, given those before: made up, but always the same."""
    return -0.25 - (sum(ids[: at + 1]) * 31 % 97) / 32


@dataclass
class TeacherDouble:
    """An endpoint. `fails`: statuses of the next answers; `poison`: token ids that fail as `chokes` says."""

    tokenizer: Path
    model: str = "big"
    url: str = ""
    fails: list[int] = field(default_factory=list)
    down: bool = False
    refuses: int = 10_000
    poison: set[int] = field(default_factory=set)
    chokes: Literal["error", "nan", "silence"] = "error"
    shift: int = 0
    leaves_out: tuple[str, ...] = ()
    says: list[int] = field(default_factory=lambda: [7, 8, 256])
    ends: str = "stop"
    garbage: bytes | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._words = AutoTokenizer.from_pretrained(self.tokenizer)
        self._under_way, self._lock = 0, threading.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        status, answer = self._answer(scope, request := json.loads(body))
        if self.chokes == "silence" and self._poisoned(request):
            await asyncio.sleep(1)
        self._under_way -= 1
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def _answer(self, scope: Any, body: dict[str, Any]) -> tuple[int, Any]:
        self.paths.add(scope["path"])
        self.keys.append(dict(scope["headers"]).get(b"authorization", b"").decode() or None)
        if self.down:
            return 503, _error("the engine is asleep")
        if self.fails:
            return self.fails.pop(0), _error("for once")
        if self.garbage is not None:
            return 200, self.garbage
        if body["model"] != self.model:
            return 404, _error(f"The model `{body['model']}` does not exist.")
        self.requests.append(body)
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = [each + self.shift for each in self._words.encode(ids, add_special_tokens=False)]
        if ids is body["prompt"] and len(ids) > self.refuses:
            return 400, _error(f"This model's maximum context length is {self.refuses} tokens.")
        if self.chokes == "error" and self._poisoned(body):
            return 500, _error("out of range float values are not JSON compliant")
        return 200, {"choices": [{key: v for key, v in self._choice(ids, body).items() if key not in self.leaves_out}]}

    def _poisoned(self, body: dict[str, Any]) -> bool:
        return not isinstance(body["prompt"], str) and not self.poison.isdisjoint(body["prompt"])

    def _choice(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        answer = None
        if body.get("prompt_logprobs") is not None:
            reply = [logprob_of(ids, at) for at in range(len(ids))]
            if self.chokes == "nan" and self._poisoned(body):
                reply[-1] = math.nan
            answer = [None, *({str(ids[at]): {"logprob": reply[at]}} for at in range(1, len(ids)))]
        return {
            "prompt_token_ids": ids,
            "prompt_logprobs": answer,
            "token_ids": self.says,
            "finish_reason": self.ends,
        }


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError"}}


@contextmanager
def teaching(tokenizer: Path, **but: Any) -> Iterator[TeacherDouble]:
    """A teacher at `url` until the block ends."""
    double = TeacherDouble(tokenizer, **but)
    with serving(double) as url:
        double.url = url
        yield double
