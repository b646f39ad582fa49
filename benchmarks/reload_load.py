"""The load of the reload benchmark: steady lanes of streamed and whole chats, read with a stopwatch."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

_DONE = b"data: [DONE]"


@dataclass
class Seen:
    """One system's readings by its clients; `gaps` are (end, seconds) between two pieces of a stream."""

    requests: int = 0
    failed: int = 0
    cut_off: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)

    def longest(self, since: float, until: float) -> float:
        """The longest gap that lies, with some of it at least, between two moments; 0 if there was none."""
        return max((gap for at, gap in self.gaps if at > since and at - gap < until), default=0.0)


@dataclass(frozen=True)
class Lanes:
    """How many of either kind run at once, and how long a reply is."""

    streams: int
    wholes: int
    tokens: int


@asynccontextmanager
async def under_load(http: httpx.AsyncClient, model: str, lanes: Lanes, seen: Seen) -> AsyncIterator[None]:
    """Keep all lanes busy until the block ends, then let each end its reply."""
    over = asyncio.Event()

    async def lane(number: int, *, stream: bool) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"tell me about {number}"}],
            "max_tokens": lanes.tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        while not over.is_set():
            await _one(http, body, seen)

    async with asyncio.TaskGroup() as group:
        for number in range(lanes.streams):
            group.create_task(lane(number, stream=True))
        for number in range(lanes.wholes):
            group.create_task(lane(lanes.streams + number, stream=False))
        try:
            yield
        finally:
            over.set()


async def _one(http: httpx.AsyncClient, body: dict[str, object], seen: Seen) -> None:
    seen.requests += 1
    try:
        finished = await (_stream(http, body, seen) if body["stream"] else _whole(http, body))
    except (httpx.HTTPError, LookupError, ValueError) as error:
        seen.failed += 1
        seen.why[f"{type(error).__name__}: {error}"[:200]] += 1
        await asyncio.sleep(0.1)
    else:
        if finished != "length":
            seen.cut_off += 1
            seen.why[f"finish_reason {finished}"] += 1


async def _whole(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    reply = await http.post("/v1/chat/completions", json=body)
    return str(reply.raise_for_status().json()["choices"][0]["finish_reason"])


async def _stream(http: httpx.AsyncClient, body: dict[str, object], seen: Seen) -> str:
    """The finish reason of a stream, "" if it ended without one."""
    ending, before = b"", None
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for piece in reply.raise_for_status().aiter_raw():
            now = time.perf_counter()
            if before is not None:
                seen.gaps.append((now, now - before))
            ending, before = ending[-4096:] + piece, now
    lines = [line for line in ending.splitlines() if line]
    if lines[-1:] != [_DONE]:
        return ""
    return str(json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] or "")
