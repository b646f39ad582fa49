"""Brings exchanges and feedback to disk: when `record` returns they are safe, whatever dies next."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.capture.spool import Spool
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared import steady_time
from tuneloop.shared.errors import LedgerForbidden, SpoolFull
from tuneloop.shared.experience import Exchange, Feedback, Record, encode
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.spool_format import (
    Position,
    backlog_of,
    flushed_of,
    frames,
    next_after,
    recorded_at,
    refusal_of,
    slots,
)

log = structlog.get_logger()

#: How much of the file system stays free, whichever is less: replies in flight when requests are refused need it.
RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30

_LOOK_S = 0.5

#: From this size on records are redacted in a thread: others' replies go on meanwhile.
_LARGE = 256 << 10

#: What an event without a text counts for in that.
_EVENT_CHARACTERS = 512


class _Waits(NamedTuple):
    """What a slot's oldest record is, and since when it waits."""

    done: Position
    since: float


class SpoolLimits:
    """What all slots below one root hold together: several processes, dead ones too, share the bound.

    `admit` is asked for every request and reads nothing: our own bytes are counted as they are written, what others
    hold and the disk are looked at every half a second. Between two looks all is well until we have written as much as
    there was room for. `check_database` raises LedgerForbidden where what is spooled could reach no ledger of ours: its
    file was deleted or replaced.
    """

    def __init__(
        self,
        own: Spool,
        *,
        max_bytes: int,
        max_age_s: float,
        check_database: Callable[[], None] = lambda: None,
        disk: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._own = own
        self._check_database = check_database
        self._misplaced: str | None = None
        self._disk = disk
        self._root = own.folder.parent
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._waits: dict[Path, _Waits] = {}
        self.look()

    async def run(self, metrics: Metrics) -> None:
        """Bring the limits up to date every half a second."""

        async def look() -> None:
            try:
                await asyncio.to_thread(self.look)
            except OSError as error:
                log.error("spool_limits_not_updated", folder=str(self._root), reason=str(error))

        await every(_LOOK_S, look, task="spool_limits", metrics=metrics)

    def look(self) -> None:
        """Bring what `admit` goes by up to date."""
        try:
            self._check_database()
            self._misplaced = None
        except LedgerForbidden as error:
            self._misplaced = f"the database is not there any more: {error}"
        self._own.check()
        found = slots(self._root)
        self._refusal = refusal_of(self._root)
        self._elsewhere = sum(backlog_of(slot) for slot in found if slot != self._own.folder)
        waits = {slot: waits for slot in found if (waits := self._oldest_of(slot))}
        self._waits = waits
        disk, self._written = self._disk(self._root), self._own.written
        self._reserve = min(int(RESERVE_SHARE * disk.f_blocks * disk.f_frsize), RESERVE_BYTES)
        self._free = disk.f_bavail * disk.f_frsize
        done, left = not self._own.backlog_bytes(), self._free - self._reserve
        # A segment goes when all of it is in the database: on a small disk that must not be when nothing else has room.
        large = 0 < left < self._own.end.offset
        self._fine_until = 0
        if self._own.broken or large or (done and self._own.end.offset and self._disk_is_full()):
            self._own.renew()

    def admit(self) -> None:
        """Raise SpoolFull when no more should be taken on, because it might not be kept."""
        if self._misplaced:
            raise SpoolFull(self._misplaced)
        if self._own.broken:
            raise SpoolFull(self._own.broken)
        if self._own.written < self._fine_until:
            return
        if (left := self._max_bytes - self.bytes()) <= 0:
            raise SpoolFull(f"the spool holds {self._max_bytes} bytes that the database has not taken")
        if self._disk_is_full():
            raise SpoolFull(f"the disk of the spool has less than {self._reserve} bytes left")
        if (oldest_s := self.oldest_s()) > self._max_age_s:
            raise SpoolFull(f"the database has not taken what the spool has held for {self._max_age_s:g} seconds")
        if oldest_s + 2 * _LOOK_S < self._max_age_s:
            self._fine_until = min(self._own.written + left, self._written + self._free - self._reserve)

    @property
    def refusal(self) -> str | None:
        """Why the database refuses what it is given, though it answers; None if it does not."""
        return self._refusal.reason if self._refusal else None

    def bytes(self) -> int:
        """Bytes that wait for the database."""
        return self._own.backlog_bytes() + self._elsewhere

    def oldest_s(self) -> float:
        """How long the oldest record has waited for the database; 0 if none waits."""
        if not self.bytes():
            return 0.0
        return max((steady_time.now() - waits.since for waits in self._waits.values()), default=0.0)

    def _disk_is_full(self) -> bool:
        return self._free - (self._own.written - self._written) < self._reserve

    def _oldest_of(self, slot: Path) -> _Waits | None:
        done = flushed_of(slot)
        known = self._waits.get(slot)
        if known and known.done == done:
            return known
        found = next_after(slot, done)
        return _Waits(done, recorded_at(*found)) if found else None


class Recorder:
    """The spool, as the routes see it: what it gets has been redacted."""

    def __init__(
        self,
        spool: Spool,
        limits: SpoolLimits,
        metrics: Metrics,
        redactor: Redactor | None = None,
    ) -> None:
        self._spool = spool
        self._limits = limits
        self._metrics = metrics
        self._redactor = redactor if redactor else None
        self._writing: set[asyncio.Task[list[Record]]] = set()
        # More threads would only keep each other, and the event loop, from the interpreter.
        self._threads = ThreadPoolExecutor(2, "redaction")

    def admit(self) -> None:
        """Raise SpoolFull if the reply to a request could not be kept."""
        self._limits.admit()

    async def record(self, exchange: Exchange) -> None:
        """Bring an exchange to disk; it gets there even if the request's own task is cancelled meanwhile."""
        [written] = await self._write([exchange])
        assert isinstance(written, Exchange)
        for experience in written.experiences:
            self._metrics.count_recorded(experience.drop_reason or experience.unsampled or "")

    async def take(self, events: Sequence[Feedback]) -> Sequence[Feedback]:
        """Bring feedback to disk, all of it or none; the events as they were written."""
        self._limits.admit()
        return [each for each in await self._write(events) if isinstance(each, Feedback)]

    @property
    def slow(self) -> bool:
        """Whether even a name may take longer than an event loop should wait."""
        return self._redactor is not None and self._redactor.slow

    def name_as_stored(self, name: str) -> str:
        """What a task, a run or a person of this name is called in the database."""
        return self._redactor.name(name) if self._redactor else name

    def pairs_as_stored(self, pairs: Mapping[str, str]) -> Mapping[str, str]:
        """Metadata as it may be stored."""
        return self._redactor.pairs(pairs) if self._redactor else pairs

    async def close(self) -> None:
        """Wait for what is still being redacted, whose requests were cancelled."""
        await asyncio.gather(*self._writing, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _write(self, records: Sequence[Record]) -> list[Record]:
        redactor, size = self._redactor, sum(map(_size, records))
        if size > _LARGE or self.slow:
            task = asyncio.create_task(self._write_aside(records))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task])  # what it holds counts as its request's until it is done
                raise
        written = redactor.records(records) if redactor else list(records)
        await self._spool.append([encode(each) for each in written])
        return written

    async def _write_aside(self, records: Sequence[Record]) -> list[Record]:
        """The same while others are answered."""
        redactor = self._redactor

        def prepare() -> tuple[list[Record], bytes]:
            written = redactor.records(records) if redactor else list(records)
            return written, frames(map(encode, written))

        written, data = await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
        await self._spool.append_frames(data)
        return written


def _size(record: Record) -> int:
    """About how many characters there are to be looked at."""
    if isinstance(record, Feedback):
        return len(record.text or "") + _EVENT_CHARACTERS
    return len(record.request) + sum(len(each.text) + len(each.prompt_ids) for each in record.experiences)
