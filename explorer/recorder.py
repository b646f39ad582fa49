"""Brings exchanges and feedback to disk: when `record` returns they are safe, whatever dies next."""

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import LedgerForbidden, StorageFull
from tuneloop.shared.experience import Exchange, Feedback, Outcome, Record, encode, steady_clock
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.ledger.versions.alarms import Alarms
from tuneloop.shared.operations.diagnosis import CAPTURE_MISMATCH
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.privacy.redactor import Redactor
from tuneloop.shared.settings.serving import CaptureSettings

log = structlog.get_logger()

#: A file takes so many bytes, and is open for so many seconds.
FILE_BYTES, FILE_S = 256 << 20, 3600.0

#: How much of the file system stays free, whichever is less: replies in flight when requests are refused need it.
RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30

_LOOK_S = 0.5

#: How often the alarm about captured log-probabilities is looked for.
_ALARM_S = 5.0

#: Of so many seconds a share is captured. No multiple of a minute: requests by a timer move through it.
_PERIOD_S = 59.0

#: How much must go onto a disk that has refused a write before it counts as repaired.
_PROOF = bytes(64 << 10)

#: From this size on records are redacted in a thread: others' replies go on meanwhile.
_LARGE = 256 << 10

#: What an event without a text counts for in that.
_EVENT_CHARACTERS = 512

#: How long a call waits for what became of its feedback, which is safe by then.
_PATIENCE_S = 2.0


class OutboxLimits:
    """What the outbox holds at most: several processes share the bound.

    `admit` is asked for every request and reads nothing: the drain reports what waits, our own bytes are counted as
    they are written, and the disk is looked at every half a second. `check_database` raises LedgerForbidden where
    what is recorded could reach no ledger of ours: its file was deleted or replaced.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        max_bytes: int,
        max_age_s: float,
        check_database: Callable[[], None] = lambda: None,
    ) -> None:
        self._outbox, self._check_database = outbox, check_database
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self.status = OutboxStatus()
        self._bytes_at_status = 0  # what we had written when the status came
        self._misplaced: str | None = None
        #: Why the disk refused the last record; None once it takes one again.
        self.broken: str | None = None
        self.look()

    async def run(self, metrics: Metrics) -> None:
        await every(_LOOK_S, partial(asyncio.to_thread, self.look), task="outbox_limits", metrics=metrics)

    def look(self) -> None:
        try:
            self._check_database()
            self._misplaced = None
        except LedgerForbidden as error:
            self._misplaced = f"the database is not there any more: {error}"
        try:
            disk, self._written = os.statvfs(self._outbox.folder), self._outbox.written
            if self.broken is not None:
                with tempfile.TemporaryFile(dir=self._outbox.folder) as file:
                    file.write(_PROOF)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            self.note_refusal(error)
            return
        self._reserve = min(int(RESERVE_SHARE * disk.f_blocks * disk.f_frsize), RESERVE_BYTES)
        self._free = disk.f_bavail * disk.f_frsize
        self.broken = None  # after these, of which there are none before the first look that succeeds
        # A file goes when all of it is in the database: on a small disk that must not be when nothing else has room.
        small = self._free - self._reserve < FILE_BYTES
        self._outbox.begin_new_file(after_s=_LOOK_S if small else FILE_S)

    def note_refusal(self, error: OSError) -> None:
        if self.broken is None:
            log.error("outbox_broken", folder=str(self._outbox.folder), reason=error.strerror)
        cure = "make room: see `df` and `df -i`" if error.errno == errno.ENOSPC else "see `dmesg` and the disk's mount"
        self.broken = f"{self._outbox.folder} takes no records: {error.strerror}: {cure}"

    def note(self, status: OutboxStatus) -> None:
        self.status, self._bytes_at_status = status, self._outbox.written

    def admit(self) -> None:
        if reason := self._misplaced or self.broken:
            raise StorageFull(reason)
        written = self._outbox.written
        if self.status.bytes + written - self._bytes_at_status >= self._max_bytes:
            raise StorageFull(f"the outbox holds {self._max_bytes} bytes that the database has not taken")
        if self._free - (written - self._written) < self._reserve:
            raise StorageFull(f"the disk of the outbox has less than {self._reserve} bytes left")
        if self.status.since is not None and steady_clock() - self.status.since > self._max_age_s:
            message = f"the database has not taken what the outbox has held for {self._max_age_s:g} seconds"
            raise StorageFull(message)


class CaptureChoice:
    """Which replies engines return log-probabilities for: those of a share of the time, by the clock; all while the
    alarm of a mismatch is open.

    An engine computes log-probabilities of a whole step for one request of it, so that a share of the replies of every
    moment would cost nearly what all cost.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._all = settings.logprobs == "all"
        self._share = settings.captured_share
        self.mistrusted = False

    def asks(self, upstream: Mapping[str, Any], *, truncated: bool = False) -> bool:
        """Whether the engine is asked for log-probabilities; what a `truncated` reply left only it knows."""
        wanted = upstream.get("logprobs")  # of a text, 0 is a number of them
        if self._all or self.mistrusted or truncated or not (wanted is None or wanted is False):
            return True
        return time.time() % _PERIOD_S < self._share * _PERIOD_S

    async def watch(self, alarms: Alarms, metrics: Metrics) -> None:
        async def look() -> None:
            raised = await asyncio.to_thread(alarms.all)
            mistrusted = any(alarm.name == CAPTURE_MISMATCH for alarm in raised)
            if mistrusted != self.mistrusted:
                log.warning("capture_switched", logprobs="all" if mistrusted else f"a share of {self._share:g}")
            self.mistrusted = mistrusted

        if not self._all:
            await every(_ALARM_S, look, task="capture", metrics=metrics)


class _Call:
    def __init__(self, events: Sequence[Feedback]) -> None:
        self._left = {event.event_id: event for event in events}
        self.results = FeedbackResults(outcomes=dict.fromkeys(self._left, Outcome.PENDING))
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, results: FeedbackResults) -> None:
        # By the fewer of both: a call may wait for a hundred thousand events, and gets some hundred at once.
        found = results.of([self._left[event_id] for event_id in results.outcomes.keys() & self._left.keys()])
        for name in FeedbackResults.__struct_fields__:
            getattr(self.results, name).update(getattr(found, name))
        for event_id in found.outcomes:
            del self._left[event_id]
        if not self._left:
            self.end()

    def end(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


class Recorder:
    """The outbox, as the routes see it. `wake_drain` wakes the drain because a call waits."""

    def __init__(
        self,
        outbox: Outbox,
        limits: OutboxLimits,
        metrics: Metrics,
        redactor: Redactor | None = None,
        *,
        wake_drain: Callable[[], None],
    ) -> None:
        self._outbox, self._limits, self._metrics, self._wake_drain = outbox, limits, metrics, wake_drain
        self._redactor = redactor if redactor else None
        self._writing: set[asyncio.Task[list[Record]]] = set()
        # More threads would only keep each other, and the event loop, from the interpreter.
        self._threads, self._appender = ThreadPoolExecutor(2, "redaction"), ThreadPoolExecutor(1, "outbox")
        self._waiting: list[tuple[Sequence[bytes], asyncio.Future[None]]] = []
        self._is_appending, self._append_at = False, 0.0
        self._calls: set[_Call] = set()
        self._away = False

    @property
    def append_s(self) -> float:
        """How long the disk has been taking the records that it was given last, if it is at it."""
        return time.monotonic() - self._append_at if self._is_appending else 0.0

    def admit(self) -> None:
        self._limits.admit()

    async def record(self, exchange: Exchange) -> None:
        """Bring an exchange to disk; it gets there even if the request's own task is cancelled meanwhile."""
        [written] = await self._write([exchange])
        assert isinstance(written, Exchange)
        for experience in written.experiences:
            self._metrics.count_recorded(experience.drop_reason or experience.unsampled or "")

    async def take(self, events: Sequence[Feedback]) -> FeedbackResults:
        self._limits.admit()
        call = _Call(events)
        self._calls.add(call)
        try:
            await self._write(events)
            if not self._away:
                self._wake_drain()
                await asyncio.wait([call.is_over], timeout=_PATIENCE_S)
        finally:
            self._calls.discard(call)
        return call.results

    def note_results(self, results: FeedbackResults) -> None:
        for call in list(self._calls):
            call.take(results)

    def note_status(self, status: OutboxStatus, *, away: bool) -> None:
        self._limits.note(status)
        self._away = away
        for call in self._calls if away else ():
            call.end()

    @property
    def slow(self) -> bool:
        """Whether even a name may take longer than an event loop should wait."""
        return self._redactor is not None and self._redactor.slow

    def name_as_stored(self, name: str) -> str:
        """What a task, a run or a person of this name is called in the database."""
        return self._redactor.name(name) if self._redactor else name

    def pairs_as_stored(self, pairs: Mapping[str, str]) -> Mapping[str, str]:
        return self._redactor.pairs(pairs) if self._redactor else pairs

    async def close(self) -> None:
        await asyncio.gather(*self._writing, return_exceptions=True)
        while self._is_appending:
            with suppress(StorageFull):  # the waiting call has its answer
                await self._append([])
        self._threads.shutdown(wait=False)
        self._appender.shutdown()

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
        await self._append([encode(each) for each in written])
        return written

    async def _write_aside(self, records: Sequence[Record]) -> list[Record]:
        """The same while others are answered."""
        redactor = self._redactor

        def prepare() -> tuple[list[Record], list[bytes]]:
            written = redactor.records(records) if redactor else list(records)
            return written, [encode(each) for each in written]

        written, payloads = await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
        await self._append(payloads)
        return written

    async def _append(self, payloads: Sequence[bytes]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((payloads, done))
        if not self._is_appending:
            self._append_waiting()
        await done  # who is cancelled meanwhile has the records written all the same

    def _append_waiting(self) -> None:
        """Bring to disk what waits, and then what has come meanwhile."""
        loop, group, self._waiting = asyncio.get_running_loop(), self._waiting, []
        self._is_appending, self._append_at = bool(group), time.monotonic()

        def append() -> None:
            error: OSError | None = None
            try:
                self._outbox.append([payload for each, _ in group for payload in each])
            except (OSError, MemoryError) as refused:
                error = refused if isinstance(refused, OSError) else OSError(errno.EIO, repr(refused))
            loop.call_soon_threadsafe(settle, error)

        def settle(error: OSError | None) -> None:
            if error is not None:
                self._limits.note_refusal(error)
            for _, done in group:
                if error is None and not done.done():
                    done.set_result(None)
                elif not done.done():
                    done.set_exception(StorageFull(str(self._limits.broken)))
            self._append_waiting()

        if group:
            self._appender.submit(append)


def _size(record: Record) -> int:
    """About how many characters there are to be looked at."""
    if isinstance(record, Feedback):
        return len(record.text or "") + _EVENT_CHARACTERS
    return len(record.request) + sum(len(each.text) + len(each.prompt_ids) for each in record.experiences)
