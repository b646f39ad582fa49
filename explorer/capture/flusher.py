"""Moves what the spool holds into the ledger, in order, as soon as the database takes it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.spool_slots import FlushedMark, Slot, Slots
from tuneloop.shared.errors import LedgerError, LedgerUnavailable, TuneloopError
from tuneloop.shared.experience import Record, decode
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.spool_format import Position, segments, slots

log = structlog.get_logger()

#: Records that go into the database in one transaction.
GROUP = 512
#: How often a record is offered to the database before it goes to quarantine.
TRIES = 5

#: How often we look for what processes that died meanwhile have left.
ADOPT_S = 2.0

#: How often we look whether our writers have written: what comes meanwhile goes into the database together. Who waits
#: for it is not kept waiting.
_LOOK_S = 0.1
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_DISK_PAUSE_S = 0.5

#: The database refuses a record, or it cannot even be made a row.
_REFUSED = (LedgerError, ValueError, OverflowError)


class _Waiter(NamedTuple):
    ends: Sequence[tuple[Slot, Position]]
    told: "asyncio.Future[None]"

    @property
    def reached(self) -> bool:
        return all(slot.flushed.position >= end for slot, end in self.ends)


class Flusher:
    """One thread that reads the slots behind their writers, in this process or in others of ours.

    `quarantined` is called once for each record that the database refuses again and again, `failed` if the thread
    cannot go on.
    """

    def __init__(
        self,
        slots: Slots,
        recording: Recording,
        *,
        quarantined: Callable[[], None],
        failed: Callable[[TuneloopError], None],
    ) -> None:
        self._slots = slots
        self._recording = recording
        self._quarantined = quarantined
        self._failed = failed
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._moved = threading.Lock()
        self._adopted_once = False
        self._waiting: list[_Waiter] = []
        self._away = False
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)

    def start(self) -> None:
        """Begin with what dead processes left behind, then follow the writers."""
        self._thread.start()

    def stop(self) -> None:
        """Move what is there, unless the database is away: then it stays in the spool for the next start."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    @property
    def away(self) -> bool:
        """Whether the database did not take what it was last given."""
        return self._away

    async def wait_until_flushed(self, timeout_s: float) -> bool:
        """Wait until all that is on disk now is in the database; False if that is away, or it is not by then."""
        ends = [(slot, slot.end) for slot in self._slots.ours]
        waiter = _Waiter(ends, asyncio.get_running_loop().create_future())
        with self._moved:
            self._waiting.append(waiter)
            self._tell()
        self._wake.set()
        try:
            # Not in a thread: a slow database would soon have all of the pool's waiting for it.
            await asyncio.wait([waiter.told], timeout=timeout_s)
        finally:
            with self._moved, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)
        return self._adopted_once and waiter.reached

    def _tell(self) -> None:
        for waiter in [each for each in self._waiting if self._away or (self._adopted_once and each.reached)]:
            self._waiting.remove(waiter)
            waiter.told.get_loop().call_soon_threadsafe(_settle, waiter.told)

    def _run(self) -> None:
        try:
            self._follow()
        except TuneloopError as error:
            self._failed(error)
        except Exception as error:
            log.exception("flusher_failed")
            self._failed(LedgerError(f"the spool cannot be moved into the database: {error!r}"))

    def _follow(self) -> None:
        adopt_at = time.monotonic()
        while True:
            stopping = self._stop.is_set()
            self._wake.clear()
            if stopping or time.monotonic() >= adopt_at:
                self._adopt_all()
                adopt_at = time.monotonic() + ADOPT_S
            all_moved = all([self._drained_ours(slot) for slot in self._slots.ours])
            if stopping or (self._stop.is_set() and not all_moved):
                return
            self._wake.wait(_LOOK_S)

    def _drained_ours(self, slot: Slot) -> bool:
        adopted = not self._slots.lives(slot.folder) and self._adopt(slot.folder)
        return adopted or self._drained(slot.folder, slot.flushed, slot.end)

    def _drained(self, folder: Path, mark: FlushedMark, end: Position | None) -> bool:
        try:
            return self._drain(folder, mark, end)
        except OSError as error:  # such as no place for the quarantine: what is not marked is read again
            log.error("spool_not_drained", folder=str(folder), reason=str(error))
            self._stop.wait(_DISK_PAUSE_S)
            return False

    def _adopt_all(self) -> None:
        for folder in slots(self._slots.root):
            if not self._slots.lives(folder) and not self._stop.is_set() and segments(folder):
                self._adopt(folder)
        with self._moved:
            self._adopted_once = True
            self._tell()

    def _adopt(self, folder: Path) -> bool:
        """Drain the slot of a process that is no more, and leave no segment of it. False if that cannot be yet."""
        try:
            with spool.take_slot(folder), contextlib.closing(FlushedMark(folder / "flushed")) as mark:
                left = segments(folder)
                if not self._drained(folder, mark, None):
                    return False
                if left:
                    self._mark(folder, mark, Position(left[-1] + 1, 0))
                self._slots.mark_adopted(folder)
                return True
        except BlockingIOError:  # somebody writes there again
            return False
        except OSError as error:
            log.error("spool_not_adopted", folder=str(folder), reason=str(error))
            return False

    def _drain(self, folder: Path, mark: FlushedMark, end: Position | None) -> bool:
        """Move what there is before `end` (None: all); False if we were told to stop while the database was away."""
        group: list[bytes] = []
        start = position = mark.position
        if end is None or end > start:
            for payload, position in spool.read(folder, start, end):
                group.append(payload)
                if len(group) == GROUP:
                    if not self._move(folder, group):
                        return False
                    self._mark(folder, mark, position)
                    group = []
        if group and not self._move(folder, group):
            return False
        # What lies between the last record and the end was torn by a crash, or is a segment still empty.
        self._mark(folder, mark, max(end or start, position))
        return True

    def _mark(self, folder: Path, mark: FlushedMark, position: Position) -> None:
        if position <= mark.position:
            return
        with self._moved:
            mark.move(position)
            self._tell()
        spool.forget(folder, position)

    def _move(self, folder: Path, payloads: Sequence[bytes]) -> bool:
        """Put the group into the database; False if we were told to stop while it was away."""
        records: list[Record] = []
        for payload in payloads:
            try:
                records.append(decode(payload))
            except msgspec.MsgspecError as error:
                self._set_aside(folder, payload, error)
        try:
            return not records or self._record(records)
        except _REFUSED as error:
            log.warning("group_refused", records=len(records), reason=_reason(error))
        return all(self._one(folder, payload) for payload in payloads)

    def _record(self, records: Sequence[Record]) -> bool:
        pause = _SHORTEST_PAUSE_S
        while True:
            try:
                self._recording.record(records)
            except LedgerUnavailable as error:
                if pause == _SHORTEST_PAUSE_S:
                    log.warning("database_away", reason=_reason(error))
                else:
                    self._say(away=True)  # not at the first failure, which may be no more than a broken connection
                if self._stop.wait(pause):
                    return False
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._say(away=False)
                return True

    def _say(self, *, away: bool) -> None:
        with self._moved:
            self._away = away
            self._tell()

    def _one(self, folder: Path, payload: bytes) -> bool:
        """Find the one record that the database refuses, and keep it from blocking the others."""
        for tries in range(1, TRIES + 1):
            try:
                return self._record([decode(payload)])
            except msgspec.MsgspecError:
                return True  # already set aside
            except _REFUSED as error:
                if tries == TRIES:
                    self._set_aside(folder, payload, error)
        return True

    def _set_aside(self, folder: Path, payload: bytes, error: Exception) -> None:
        log.error("record_quarantined", folder=str(folder), reason=_reason(error))
        spool.quarantine(folder, payload)
        self._quarantined()


def _reason(error: Exception) -> str:
    """In one line: the next ones may quote what a user wrote."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _settle(told: "asyncio.Future[None]") -> None:
    if not told.done():
        told.set_result(None)
