"""Rewards on their way: to the journal first, then to the services, many runs in one call."""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuneloop.runner.tuning.journal import Journal, RunResult, acknowledged_line, name_of, result_line
from tuneloop.runner.tuning.services.service_client import ServiceClient

#: What the feedback's `source` is.
SOURCE = "tune"

#: A metric of a workflow or judge is stored under this and its name, so that none is taken for the reward.
METRIC_PREFIX = "metrics/"

_MAX_NAME = 256
_MOST_AT_ONCE = 256


class RewardOutbox:
    """Takes results; each is on disk, and its reward at its services, when `send` returns."""

    def __init__(self, journal: Journal, services: Mapping[str, ServiceClient]) -> None:
        self._journal, self._services = journal, services
        self._waiting: list[tuple[RunResult, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, result: RunResult) -> None:
        """Keep the result, and give its reward. Results that come while others are sent go together."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._drain())
        await future

    async def send_again(self, results: Sequence[RunResult]) -> None:
        """Give the rewards that an earlier process kept, and may have given: the services take each once."""
        for start in range(0, len(results), _MOST_AT_ONCE):
            await self._give(results[start : start + _MOST_AT_ONCE])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST_AT_ONCE], self._waiting[_MOST_AT_ONCE:]
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: Sequence[tuple[RunResult, asyncio.Future[None]]]) -> None:
        try:
            results = [result for result, _ in batch]
            await self._journal.append(*map(result_line, results))
            await self._give([result for result in results if result.rewards])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for _, future in batch:
                if not future.done():
                    future.set_result(None)

    async def _give(self, results: Sequence[RunResult]) -> None:
        if not results:
            return
        by_service = {
            name: [entry for result in results if name in result.rewards for entry in _entries(result, name)]
            for name in self._services
        }
        await asyncio.gather(*(self._services[name].feedback(sent) for name, sent in by_service.items() if sent))
        await self._journal.append(acknowledged_line(results))


def _entries(result: RunResult, model: str) -> Iterator[dict[str, Any]]:
    run = {"task_id": result.task_id, "run_id": result.run_id, "source": SOURCE, "idempotency_key": _key(result)}
    yield run | {"reward": result.rewards[model]}
    for name, value in result.metrics.items():
        yield run | {"metric": f"{METRIC_PREFIX}{name}"[:_MAX_NAME], "value": value}


def _key(result: RunResult) -> str:
    name = name_of(result)
    return name if len(name) <= _MAX_NAME else hashlib.sha256(name.encode()).hexdigest()
