"""Brings exchanges and feedback to disk: when `record` returns they are safe, whatever dies next."""

import asyncio
from collections.abc import Sequence

from explorer.metrics import Metrics
from explorer.spool import Position, Spool
from shared.experience import Exchange, Feedback, encode


class Recorder:
    """The spool, as the routes see it."""

    def __init__(self, spool: Spool, metrics: Metrics) -> None:
        self._spool = spool
        self._metrics = metrics

    def admit(self) -> None:
        """Raise SpoolFull if a request should not even start, because its reply could not be kept."""
        self._spool.admit()

    async def record(self, exchange: Exchange) -> None:
        """Bring an exchange to disk, even if the request's own task is cancelled meanwhile."""
        await asyncio.shield(self._spool.append([encode(exchange)]))
        for experience in exchange.experiences:
            self._metrics.recorded.labels(experience.drop_reason or "").inc()

    async def take(self, events: Sequence[Feedback]) -> Position:
        """Bring feedback to disk, all of it or none."""
        self._spool.admit()
        position = await self._spool.append([encode(event) for event in events])
        self._metrics.feedback.inc(len(events))
        return position

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""
        return self._spool.end
