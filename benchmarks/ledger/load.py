"""The load of the ledger's benchmark: replies as a chat model gives them, and lanes that record them."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from sqlalchemy.exc import SQLAlchemyError

from tuneloop.shared.errors import TuneloopError

PROMPT_TOKENS = 1000

_VOCABULARY = 151_936
_LETTERS_PER_TOKEN = 4
_DOCS = Path(__file__).parents[2] / "docs"


class Reply(NamedTuple):
    """An engine's answer with its request."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    request: bytes
    text: str


def replies(count: int, completion_tokens: int) -> list[Reply]:
    """So many different ones, the same each time.

    How well they compress matters: texts are pieces of our own documentation, and small token ids are the frequent
    ones, as they are a tokenizer's.
    """
    chance = random.Random(5)
    prose = "\n".join(file.read_text() for file in sorted(_DOCS.glob("*.md")))

    def text(tokens: int) -> str:
        length = tokens * _LETTERS_PER_TOKEN
        start = chance.randrange(len(prose) - length)
        return prose[start : start + length]

    def ids(tokens: int) -> list[int]:
        return [int(_VOCABULARY ** chance.random()) for _ in range(tokens)]

    def reply() -> Reply:
        messages = [
            {"role": "system", "content": text(PROMPT_TOKENS // 4)},
            {"role": "user", "content": text(PROMPT_TOKENS * 3 // 4)},
        ]
        request = {"model": "Qwen/Qwen3-0.6B", "messages": messages, "stream": True, "max_tokens": completion_tokens}
        logprobs = [-chance.expovariate(2) for _ in range(completion_tokens)]
        return Reply(
            ids(PROMPT_TOKENS),
            ids(completion_tokens),
            logprobs,
            json.dumps(request).encode(),
            text(completion_tokens),
        )

    return [reply() for _ in range(count)]


class Side(Protocol):
    """A recorder on a database, ours or the peer's."""

    name: str

    async def record(self, number: int) -> None:
        """Return when the exchange may be acknowledged."""
        ...

    async def wait_until_stored(self) -> None:
        """Return when the database has all records."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to load a recorder: rounds end after so many seconds or so many exchanges, `paced` ones come that fast."""

    lanes: int
    rounds: int
    seconds: float
    most: int
    paced: float


@dataclass(frozen=True)
class Round:
    """One side's round; failures are not in `seconds`, the latencies."""

    seconds: list[float]
    failed: int
    acknowledged_per_s: float
    stored_per_s: float


async def run(side: Side, plan: Plan, *, per_s: float | None) -> Round:
    """One round: each lane records as fast as it can, or all together do `per_s` times a second."""
    started = time.perf_counter()
    latencies: list[float] = []
    failures: list[Exception] = []

    async def lane(first: int) -> None:
        for number in range(first, plan.most, plan.lanes):
            due = None if per_s is None else started + number / per_s
            if (due or time.perf_counter()) - started >= plan.seconds:
                return
            begun = await _turn(due)
            try:
                await side.record(number)
            except (SQLAlchemyError, TuneloopError) as error:
                failures.append(error)
            else:
                latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(lane(number) for number in range(plan.lanes)))
    acknowledged = time.perf_counter() - started
    await side.wait_until_stored()
    return Round(
        latencies, len(failures), len(latencies) / acknowledged, len(latencies) / (time.perf_counter() - started)
    )


async def _turn(due: float | None) -> float:
    """Wait until then; the time since when the exchange waits, which a late lane has delayed."""
    now = time.perf_counter()
    if due is None:
        return now
    if due > now:
        await asyncio.sleep(due - now)
        return time.perf_counter()
    return due


def percentile_ms(seconds: list[float], percent: float) -> float:
    """In milliseconds; NaN if there are none."""
    return float(np.percentile(seconds, percent)) * 1000 if seconds else float("nan")
