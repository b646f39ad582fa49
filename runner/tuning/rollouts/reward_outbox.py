"""Rewards on their way: to the journal first, then to the services, many runs in one call."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from tuneloop.runner.tuning.journal import Journal, RunResult, acknowledged_line, name_of, result_line
from tuneloop.runner.tuning.services.service_client import ServiceClient

#: A metric of a workflow or judge is stored under this and its name, so that none is taken for the reward.
METRIC_PREFIX = "metrics/"

_MAX_NAME = 256
_MOST_AT_ONCE = 256

#: A service takes 100 events of a run in one call, and keeps 250 of one source; other feedback may come later.
_MOST_OF_A_RUN, _MOST_METRICS = 100, 200

#: Seconds in which results gather before they are sent. Runs are not kept waiting: their places are free by then.
_GATHER_S = 0.02

#: Entries in a call, so that it stays well below the largest body that a service takes.
_MOST_OF_A_CALL = 5000

#: What became of feedback that a service does not keep.
_FULL = "full"


class RewardOutbox:
    """Takes results; each is on disk, and its reward at its services, when `send` returns."""

    def __init__(self, journal: Journal, services: Mapping[str, ServiceClient], say: Callable[[str], None]) -> None:
        self._journal, self._services, self._say = journal, services, say
        self._reported_cut = False
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
                await asyncio.sleep(_GATHER_S)
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
        """Rewards first, in a call of their own: what is said of a run's reward must not be hidden by its metrics."""
        if not results:
            return
        await asyncio.gather(*(self._give_to(name, results) for name in self._services))
        await self._journal.append(acknowledged_line(results))

    async def _give_to(self, name: str, results: Sequence[RunResult]) -> None:
        service = self._services[name]
        rewarded = [result for result in results if name in result.rewards]
        rewards = [_about(result) | {"reward": result.rewards[name]} for result in rewarded]
        outcomes = await service.feedback(rewards) if rewards else {}
        if full := [run for run, outcome in outcomes.items() if outcome == _FULL]:
            self._say(
                f"the reward of {len(full)} runs was not taken, the first of them {full[0]}: the service keeps no more "
                "feedback on them"
            )
        for first in range(0, _MOST_METRICS, _MOST_OF_A_RUN):
            metrics = [entry for result in rewarded for entry in _metrics(result)[first : first + _MOST_OF_A_RUN]]
            for start in range(0, len(metrics), _MOST_OF_A_CALL):
                await service.feedback(metrics[start : start + _MOST_OF_A_CALL])
        self._say_cut(rewarded)

    def _say_cut(self, results: Sequence[RunResult]) -> None:
        most = max((len(result.metrics) for result in results), default=0)
        if most > _MOST_METRICS and not self._reported_cut:
            self._reported_cut = True
            self._say(f"a run has {most} metrics: the service gets the first {_MOST_METRICS} of each (said once)")


def _about(result: RunResult) -> dict[str, Any]:
    return {"task_id": result.task_id, "run_id": result.run_id, "idempotency_key": _key(result)}


def _metrics(result: RunResult) -> list[dict[str, Any]]:
    named = islice(result.metrics.items(), _MOST_METRICS)
    return [_about(result) | {"metric": f"{METRIC_PREFIX}{name}"[:_MAX_NAME], "value": value} for name, value in named]


def _key(result: RunResult) -> str:
    name = name_of(result)
    return name if len(name) <= _MAX_NAME else hashlib.sha256(name.encode()).hexdigest()
