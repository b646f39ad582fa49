"""Looks each second at what moves, and asks neither the database nor a disk: it must tell when they do not answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.channel import WorkerMovement
from tuneloop.explorer.drain import Drain
from tuneloop.explorer.engines.fleet import EngineState, Fleet
from tuneloop.explorer.limits import descriptors_left
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.ledger.facts import EngineFacts, ExplorerFacts, Standstill
from tuneloop.shared.logging import LOG
from tuneloop.shared.operations.diagnosis import find_stops
from tuneloop.shared.outbox_status import OutboxStatus

_LOOK_S = 1.0

#: The states of an engine that answers, or will in a moment.
_ANSWERING = (EngineState.READY, EngineState.RELOADING, EngineState.ASLEEP)


class WatchedWorkers(Protocol):
    """The workers: what each, and the drain, has reported last."""

    outbox_status: OutboxStatus

    @property
    def movements(self) -> Sequence[WorkerMovement]:
        """Of the parts that a worker asks."""


class StopWatch:
    def __init__(self, fleet: Fleet, drain: Drain, metrics: Metrics, workers: WatchedWorkers) -> None:
        self._fleet, self._drain, self._metrics, self._workers = fleet, drain, metrics, workers
        self.judge_s: Callable[[], float] = lambda: 0.0
        self._shown: set[str] = set()
        self._stops: tuple[Standstill, ...] = ()
        LOG.count_dropped = metrics.log_dropped.inc

    def current(self) -> tuple[Standstill, ...]:
        return self._stops

    def outbox(self) -> OutboxStatus:
        return self._workers.outbox_status

    async def run(self) -> None:
        await every(_LOOK_S, self.look, task="stops", metrics=self._metrics)

    async def look(self) -> None:
        seen, engines = self._workers.movements, []
        answering = [engine for engine in self._fleet.engines if engine.state in _ANSWERING]
        await asyncio.gather(*(engine.look([each.quiet[engine.number] for each in seen]) for engine in answering))
        for engine in answering:
            still_s = 0.0 if engine.state is EngineState.ASLEEP else engine.movement.still_s
            engines.append(EngineFacts(engine.number, engine.state is EngineState.RELOADING, still_s))
        facts = ExplorerFacts(
            engines=tuple(engines),
            database_s=time.monotonic() - self._drain.moved_at,
            append_s=max((each.append_s for each in seen), default=0.0),
            judge_s=self.judge_s(),
            descriptors=min([descriptors_left(), *(each.descriptors for each in seen)]),
            refusal=self.outbox().refusal,
        )
        self._stops = find_stops(facts)
        codes = {stop.code for stop in self._stops}
        self._shown |= codes
        for code in self._shown:
            self._metrics.alarm.labels(code).set(code in codes)
        if replies := [each.reply_s for each in seen if each.reply_s is not None]:
            self._metrics.last_reply.set(time.time() - min(replies))
