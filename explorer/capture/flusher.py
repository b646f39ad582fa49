"""Moves what the spool holds into the ledger, in order, as soon as the database takes it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.intake import Intake, Patience
from tuneloop.explorer.capture.spool_slots import FlushedMark, Slot, Slots
from tuneloop.shared.errors import LedgerError, TuneloopError
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.spool_format import Position, segments, slots

log = structlog.get_logger()

#: Records that go into the database in one transaction.
GROUP = 512
#: How often we look for what processes that died meanwhile have left.
ADOPT_S = 2.0

#: How often we look whether our writers have written: what comes meanwhile goes into the database together. Who waits
#: for it is not kept waiting.
_LOOK_S = 0.1
_DISK_PAUSE_S = 0.5


class _Waiter(NamedTuple):
    ends: Sequence[tuple[Slot, Position]]
    told: "asyncio.Future[None]"

    @property
    def reached(self) -> bool:
        return all(slot.flushed.position >= end for slot, end in self.ends)


class Flusher:
    """One thread that reads the slots behind their writers, in this process or in others of ours.

    While the database is away, or forbids it, all waits. A record that is refused by itself is offered as long as
    `patience` says. `quarantined` is called once for each that was given up, `failed` if the thread cannot go on.
    """

    def __init__(
        self,
        slots: Slots,
        recording: Recording,
        *,
        quarantined: Callable[[], None],
        failed: Callable[[TuneloopError], None],
        patience: Patience | None = None,
    ) -> None:
        self._slots = slots
        self._failed = failed
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._intake = Intake(
            recording,
            slots.root,
            stop=self._stop,
            patience=patience or Patience(),
            quarantined=quarantined,
            say_away=self._say_away,
        )
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
        self._intake.note(None)  # what a process that was killed had noted
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
                    if not self._intake.move(folder, group):
                        return False
                    self._mark(folder, mark, position)
                    group = []
        if group and not self._intake.move(folder, group):
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

    def _say_away(self, away: bool) -> None:
        with self._moved:
            self._away = away
            self._tell()


def _settle(told: "asyncio.Future[None]") -> None:
    if not told.done():
        told.set_result(None)
