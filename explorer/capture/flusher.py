"""Moves what the spool holds into the ledger, in the order in which it was said, as soon as the database takes it."""

import asyncio
import contextlib
import errno
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.intake import Intake, Patience
from tuneloop.explorer.capture.spool_slots import FlushedMark, Predecessors, Slot, Slots
from tuneloop.shared.errors import LedgerError, TuneloopError
from tuneloop.shared.experience import Feedback, decode
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.spool_format import Position, segment_path, segments, slots

log = structlog.get_logger()

#: Records that go into the database in one transaction, and their bytes.
GROUP, GROUP_BYTES = 512, 32 << 20

#: How often we look for what processes that died meanwhile have left.
ADOPT_S = 2.0

#: How often we look whether our writers have written: what comes meanwhile goes into the database together. Who waits
#: for it is not kept waiting.
_LOOK_S = 0.1
_DISK_PAUSE_S = 0.5

#: How often writers are looked at until none has moved: a look takes microseconds, what they write takes longer.
_LOOKS_AT_ENDS = 1000

#: So long is moved at the end, and what is left then stays in the spool: who stops us does not wait for ever.
STOP_S = 5.0

#: What feedback has among its first bytes. An exchange is not decoded for its place in the order: it has none.
_FEEDBACK = b"\xa8feedback"


class _Source(NamedTuple):
    """A slot to be read from `mark` to `end`; None: all that the `segments` hold."""

    folder: Path
    mark: FlushedMark
    end: Position | None
    segments: Sequence[int] = ()


class _SlotRecord(NamedTuple):
    """A record of a slot, and the position after it there."""

    folder: Path
    payload: bytes
    position: Position


class _Waiter(NamedTuple):
    ends: Sequence[tuple[Slot, Position]]
    future: "asyncio.Future[bool]"

    @property
    def reached(self) -> bool:
        return all(slot.flushed.position >= end for slot, end in self.ends)


class Flusher:
    """One thread that reads the slots behind their writers, in this process or in others of ours.

    While the database is away, or forbids it, all waits. A record that is refused by itself is offered as long as
    `patience` says. `quarantined` is called once for each that was given up, `failed` if the thread cannot go on.
    `stop_s`: how long it moves on when it is told to stop.
    """

    def __init__(
        self,
        slots: Slots,
        recording: Recording,
        *,
        quarantined: Callable[[], None],
        failed: Callable[[TuneloopError], None],
        patience: Patience | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self.away = False  # whether the database did not take what it was last given
        self._stop_s, self._stopped_at = stop_s, math.inf
        self._slots = slots
        self._failed = failed
        self._stop, self._wake = threading.Event(), threading.Event()
        self._intake = Intake(
            recording,
            slots.root,
            stop=self._stop,
            patience=patience or Patience(),
            quarantined=quarantined,
            say_away=self._say_away,
        )
        self._lock = threading.Lock()  # of what those who wait are told by
        self._adopted = False  # once what dead processes left behind was moved
        self._waiting: list[_Waiter] = []
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)

    def start(self) -> None:
        """Begin with what dead processes left behind, then follow the writers."""
        self._thread.start()

    def stop(self) -> None:
        """Move what is there, for `stop_s` and unless the database is away: the rest waits for the next start."""
        self._stopped_at = time.monotonic()
        self._stop.set()
        self._wake.set()
        self._thread.join()

    async def wait_until_flushed(self, timeout_s: float) -> bool:
        """Wait until all that is on disk now is in the database. False if it is not by then, or away."""
        ends = [(slot, slot.end) for slot in self._slots.ours]
        waiter = _Waiter(ends, asyncio.get_running_loop().create_future())
        with self._lock:
            self._waiting.append(waiter)
            self._tell()
        self._wake.set()
        try:
            # Not in a thread: a slow database would soon have all of the pool's waiting for it.
            await asyncio.wait([waiter.future], timeout=timeout_s)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)
        return (waiter.future.done() and waiter.future.result()) or (self._adopted and waiter.reached)

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
        adopt_at, predecessors = time.monotonic(), Predecessors(self._slots)
        while True:
            stopping = self._stop.is_set()
            self._wake.clear()
            self._intake.look()
            if predecessors.hold and not stopping:
                self._stop.wait(_LOOK_S)
                continue
            adopts_all = stopping or time.monotonic() >= adopt_at
            moved = self._move(everywhere=adopts_all and not self._stop.is_set())
            if adopts_all:
                with self._lock:
                    self._adopted = True
                    self._tell()
                adopt_at = time.monotonic() + ADOPT_S
            if stopping or (self._stop.is_set() and not moved):
                return
            self._wake.wait(_LOOK_S)

    def _move(self, *, everywhere: bool) -> bool:
        """Move what our writers have written, and what dead ones of ours, or `everywhere` of any process, have left.

        Of the latter no segment is left. False if something could not be moved yet.
        """
        found = [slot.folder for slot in self._slots.ours]
        found += [each for each in slots(self._slots.root) if segments(each)] if everywhere else []
        with contextlib.ExitStack() as stack:
            left_behind = [folder for folder in dict.fromkeys(found) if not self._slots.lives(folder)]
            taken = [source for folder in left_behind if (source := _take(folder, stack)) is not None]
            folders = {source.folder for source in taken}
            ours = [slot for slot in self._slots.ours if slot.folder not in folders]
            # Looked at once, one after the other, writers could show a correction and not what it corrects.
            ends = [slot.end for slot in ours]
            for _ in range(_LOOKS_AT_ENDS if len(ours) > 1 else 0):
                before, ends = ends, [slot.end for slot in ours]
                if before == ends:
                    break
            living = [_Source(slot.folder, slot.flushed, end) for slot, end in zip(ours, ends, strict=True)]
            moved = self._drained([*taken, *living])
            for source in taken if moved else ():
                if source.segments:
                    self._mark(source, Position(source.segments[-1] + 1, 0))
                self._slots.mark_adopted(source.folder)
        return moved

    def _drained(self, sources: Sequence[_Source]) -> bool:
        try:
            return self._drain(sources)
        except OSError as error:  # such as no place for the quarantine: what is not marked is read again
            if len(sources) > 1:  # one that cannot be read must not keep the others
                return all([self._drained([source]) for source in sources])
            log.error("spool_not_drained", folder=str(sources[0].folder), reason=str(error))
            self._stop.wait(_DISK_PAUSE_S)
            return False

    def _drain(self, sources: Sequence[_Source]) -> bool:
        """Move what there is before each one's end. False if not all of it is: we were told to stop."""
        of = {source.folder: source for source in sources}
        for group in _groups(sources):
            if time.monotonic() - self._stopped_at >= self._stop_s:
                log.warning("spool_left_for_the_next_start", reason="there is more than can be moved now")
                return False
            if not self._intake.move([(each.folder, each.payload) for each in group]):
                return False
            for folder, position in {each.folder: each.position for each in group}.items():
                self._mark(of[folder], position)
        for source in sources:
            # What lies between the last record and the end was torn by a crash, or is a segment still empty.
            if source.end is not None:
                self._mark(source, source.end)
        return True

    def _mark(self, source: _Source, position: Position) -> None:
        if position <= source.mark.position:
            return
        with self._lock:
            source.mark.move(position)
            self._tell()
        spool.forget(source.folder, position)

    def _say_away(self, away: bool) -> None:
        with self._lock:
            self.away = away
            self._tell()

    def _tell(self) -> None:
        for waiter in list(self._waiting):
            reached = self._adopted and waiter.reached
            if reached or self.away:
                self._waiting.remove(waiter)
                waiter.future.get_loop().call_soon_threadsafe(_settle, waiter.future, reached)


def _settle(future: "asyncio.Future[bool]", reached: bool) -> None:
    if not future.done():
        future.set_result(reached)


def _take(folder: Path, stack: contextlib.ExitStack) -> _Source | None:
    try:
        stack.enter_context(spool.take_slot(folder))
        mark = stack.enter_context(contextlib.closing(FlushedMark(folder / "flushed")))
        return _Source(folder, mark, None, segments(folder))
    except BlockingIOError:  # somebody writes there again
        return None
    except OSError as error:
        log.error("spool_not_adopted", folder=str(folder), reason=str(error))
        return None


def _groups(sources: Sequence[_Source]) -> Iterator[Sequence[_SlotRecord]]:
    """The records of all the slots, by transactions: each slot's in their order, feedback of several by its stamps.

    What was said before the machine was last started comes before what was said since.
    """
    full = [source for source in sources if source.end is None or source.end > source.mark.position]
    group: list[_SlotRecord] = []
    size = 0
    merged = heapq.merge(*map(_with_order, full), key=lambda each: each[0])
    for record in _records(full[0]) if len(full) == 1 else (record for _order, record in merged):
        group.append(record)
        size += len(record.payload)
        if len(group) == GROUP or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _with_order(source: _Source) -> Iterator[tuple[tuple[bool, float], _SlotRecord]]:
    order = (False, 0.0)
    for record in _records(source):
        if _FEEDBACK in record.payload[:24]:
            with contextlib.suppress(msgspec.MsgspecError):  # it is set aside later
                said = decode(record.payload)
                if isinstance(said, Feedback) and said.stamp is not None:
                    order = max(order, said.stamp.order)
        yield order, record


def _records(source: _Source) -> Iterator[_SlotRecord]:
    _check_place(source)
    for payload, position in spool.read(source.folder, source.mark.position, source.end):
        yield _SlotRecord(source.folder, payload, position)
    _check_place(source)


def _check_place(source: _Source) -> None:
    """A folder that was moved away looks empty: what it holds must not count as read."""
    if source.end is not None and not segment_path(source.folder, source.end.segment).exists():
        raise FileNotFoundError(errno.ENOENT, "the folder of a slot was deleted or moved", str(source.folder))
