"""Brings exchanges and feedback to disk: when `record` returns they are safe, whatever dies next."""

from collections.abc import Sequence

from explorer.metrics import Metrics
from explorer.room import Room
from explorer.spool import Spool
from shared.experience import Exchange, Feedback, encode
from shared.spool_files import Position


class Recorder:
    """The spool, as the routes see it."""

    def __init__(self, spool: Spool, room: Room, metrics: Metrics) -> None:
        self._spool = spool
        self._room = room
        self._metrics = metrics

    def admit(self) -> None:
        """Raise SpoolFull if a request should not even start, because its reply could not be kept."""
        self._room.admit()

    async def record(self, exchange: Exchange) -> None:
        """Bring an exchange to disk; it gets there even if the request's own task is cancelled meanwhile."""
        await self._spool.append([encode(exchange)])
        for experience in exchange.experiences:
            self._metrics.brought_to_disk(experience.drop_reason or experience.unsampled or "")

    async def take(self, events: Sequence[Feedback]) -> Position:
        """Bring feedback to disk, all of it or none."""
        self._room.admit()
        return await self._spool.append([encode(event) for event in events])
