"""Moves what the spool holds into the ledger, in the order in which it was said, as soon as the database takes it."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.control_client import EVERYTHING, Flushed, FlushTarget
from tuneloop.explorer.capture.intake import Intake, Patience
from tuneloop.explorer.capture.merge import Owner, SlotQueue, Source
from tuneloop.explorer.capture.spool_slots import FlushedMark, Predecessors, Slot, Slots
from tuneloop.shared.errors import LedgerError, TuneloopError
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.spool_format import Position, segments, slots

log = structlog.get_logger()

#: How often we look for what processes that died meanwhile have left.
ADOPT_S = 2.0

#: How often we look whether our writers have written: what comes meanwhile goes into the database together. Who waits
#: for it is not kept waiting.
_LOOK_S = 0.1
_DISK_PAUSE_S = 0.5

#: How often writers are looked at until none has moved: a look takes microseconds, what they write takes longer.
_LOOKS_AT_ENDS = 1000

#: Who has waited for nothing for so long is not there.
_ABSENT_S = 1.0

#: How long is moved what was read, before the slots are looked at for who has written since: his turn comes then.
_SLICE_S = 0.5

#: So long is moved at the end, and what is left then stays in the spool: who stops us does not wait for ever.
STOP_S = 5.0


class _Waiter(NamedTuple):
    ends: Sequence[tuple[Slot, Position]]
    future: "asyncio.Future[Flushed]"
    target: FlushTarget
    begins: bool  # what is waited for is moved at once, not with the next group

    @property
    def reached(self) -> bool:
        return all(slot.flushed.position >= end for slot, end in self.ends)

    def progress(self, queue: SlotQueue | None) -> Flushed:
        """How much is done: of the tenant's, or key's, by the `queue`, though others' is not."""
        if self.reached:
            return Flushed.ALL
        if queue is None or (tenant := self.target.tenant) is None:
            return Flushed.NO
        left = [(slot.folder, end) for slot, end in self.ends if slot.flushed.position < end]

        def is_done(**which: Any) -> bool:
            return all(queue.is_done(tenant, folder, end, **which) for folder, end in left)

        if is_done():
            return Flushed.ALL
        if self.target.rewards_only:
            asked = is_done(rewards_only=True) and is_done(key=self.target.asker)
        else:
            asked = self.target.key is not None and is_done(key=self.target.key)
        return Flushed.ASKED if asked else Flushed.NO


class _Waiters:
    """Those who wait, and what decides what they are told; under the flusher's lock."""

    def __init__(self) -> None:
        self.adopted = False  # once what dead processes left behind was moved
        self.away = False
        self.due_at = 0.0  # when the next group begins, whoever waits for it
        self._waiting: list[_Waiter] = []

    def are_due(self) -> bool:
        """Whether a group is to begin now.

        Who asks and has nothing in it does not begin others': it would keep him from writing to the database.
        """
        return not self.adopted or time.monotonic() >= self.due_at or any(waiter.begins for waiter in self._waiting)

    def add(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self.tell()

    def remove(self, waiter: _Waiter) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)

    def tell(self, queue: SlotQueue | None = None) -> None:
        """What became of tenants is told by the `queue`'s own thread alone."""
        for waiter in list(self._waiting):
            flushed = waiter.progress(queue) if self.adopted else Flushed.NO
            if flushed or self.away:
                self._waiting.remove(waiter)
                waiter.future.get_loop().call_soon_threadsafe(_settle, waiter.future, flushed)


class _Urgency:
    """Decides who has the flusher begin at once.

    Who is alone always has. Of several each has it once in `_LOOK_S` for each target: what one asks more often goes
    with the next group that anybody begins. Else one that says a little all the time would have it at work all the
    time, and each of the others' would wait for a transaction, or for several.
    """

    def __init__(self) -> None:
        self._began: dict[Owner, dict[FlushTarget, float]] = {}  # the first of them asked longest ago
        self._asked_at: dict[Owner, float] = {}

    def begins(self, target: FlushTarget, now: float) -> bool:
        """Whether something is begun for a target now."""
        if target.tenant is None:
            return True
        owner = Owner(target.tenant, target.key or target.asker)
        began = self._began[owner] = self._began.pop(owner, {})
        self._asked_at[owner] = now
        while now - self._asked_at[first := next(iter(self._began))] > _ABSENT_S:
            del self._began[first], self._asked_at[first]
        if len(self._began) > 1 and now - began.get(target, -math.inf) < _LOOK_S:
            return False
        began[target] = now
        return True


class Flusher:
    """One thread that reads the slots behind their writers, in this process or in others of ours.

    Tenants take turns, and the keys of each. While the database is away, or forbids it, all waits. A record that is
    refused by itself is offered as long as `patience` says. `quarantined` is called once for each that was given up,
    `failed` if the thread cannot go on. `stop_s`: how long it moves on when it is told to stop.
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
        self._moved = threading.Lock()
        self._queue, self._more = SlotQueue(), False
        self._waiters, self._urgency = _Waiters(), _Urgency()
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

    @property
    def away(self) -> bool:
        """Whether the database did not take what it was last given."""
        return self._waiters.away

    async def wait_until_flushed(self, timeout_s: float, target: FlushTarget = EVERYTHING) -> Flushed:
        """Wait until what is on disk of the target is in the database. NO if it is not by then, or away."""
        ends = [(slot, slot.end) for slot in self._slots.ours]
        begins = self._urgency.begins(target, time.monotonic())
        waiter = _Waiter(ends, asyncio.get_running_loop().create_future(), target, begins)
        with self._moved:
            self._waiters.add(waiter)
        if begins:
            self._wake.set()
        try:
            # Not in a thread: a slow database would soon have all of the pool's waiting for it.
            await asyncio.wait([waiter.future], timeout=timeout_s)
        finally:
            with self._moved:
                self._waiters.remove(waiter)
        if waiter.future.done() and (told := waiter.future.result()):
            return told
        return Flushed.ALL if self._waiters.adopted and waiter.reached else Flushed.NO

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
            # Drain our slots together with those that can be taken of `left_behind`, and leave no segment of the
            # latter. False if something could not be drained yet.
            left_behind = _left_behind(self._slots, everywhere=adopts_all and not self._stop.is_set())
            with contextlib.ExitStack() as stack:
                taken = [source for folder in left_behind if (source := _take(folder, stack)) is not None]
                folders = {source.folder for source in taken}
                ours = [slot for slot in self._slots.ours if slot.folder not in folders]
                ends = _ends_at_one_moment(ours)
                moved = self._drained(
                    [*taken, *(Source(slot.folder, slot.flushed, end) for slot, end in zip(ours, ends, strict=True))]
                )
                if moved:
                    for source in taken:
                        if source.segments:
                            self._mark(source, Position(source.segments[-1] + 1, 0))
                        self._slots.mark_adopted(source.folder)
            all_moved = moved
            if adopts_all and not self._more:
                with self._moved:
                    self._waiters.adopted = True
                    self._waiters.tell()
                adopt_at = time.monotonic() + ADOPT_S
            if stopping or (self._stop.is_set() and not all_moved and not self._more):
                return
            if not self._more:
                self._wake.wait(max(0.0, self._waiters.due_at - time.monotonic()))

    def _drained(self, sources: Sequence[Source]) -> bool:
        try:
            return self._drain(sources)
        except OSError as error:  # such as no place for the quarantine: what is not marked is read again
            if len(sources) > 1:  # one that cannot be read must not keep the others
                return all([self._drained([source]) for source in sources])
            log.error("spool_not_drained", folder=str(sources[0].folder), reason=str(error))
            self._stop.wait(_DISK_PAUSE_S)
            return False

    def _drain(self, sources: Sequence[Source]) -> bool:
        """Move what there is before each one's end, now or with the next group.

        False if not all of it is: we were told to stop, or there is `more`, and it is time to look who came since.
        """
        self._more, began = False, time.monotonic()
        marks = {source.folder: source for source in sources}
        try:
            complete = self._queue.read(sources)
            is_due = self._tell_of_tenants() or self._stop.is_set() or any(source.end is None for source in sources)
            if len(self._queue) and not is_due:
                return True
            self._waiters.due_at = time.monotonic() + _LOOK_S
            while group := self._queue.take():
                work = time.thread_time()
                if not self._intake.move([(entry.folder, entry.payload) for entry in group]):
                    self._queue.clear()
                    return False
                for folder, position in self._queue.finish(group, time.thread_time() - work).items():
                    self._mark(marks[folder], position)
                self._tell_of_tenants()
                if (len(self._queue) or not complete) and self._is_over(began):
                    return False
        except OSError:
            self._queue.clear()
            raise
        if not complete:
            self._more = not self._stop.is_set()
            return False
        for source in sources:
            # What lies between the last record and the end was torn by a crash, or is a segment still empty.
            reached = self._queue.position(source)
            self._mark(source, max(source.end or reached, reached))
        return True

    def _is_over(self, began: float) -> bool:
        """Whether no more is to be moved now."""
        if time.monotonic() - self._stopped_at >= self._stop_s:
            log.warning("spool_left_for_the_next_start", reason="there is more than can be moved now")
            return True
        self._more = time.monotonic() - began >= _SLICE_S and not self._stop.is_set()
        return self._more

    def _tell_of_tenants(self) -> bool:
        """Whether somebody waits for a group to begin."""
        with self._moved:
            self._waiters.tell(self._queue)
            return self._waiters.are_due()

    def _mark(self, source: Source, position: Position) -> None:
        if position <= source.mark.position:
            return
        with self._moved:
            source.mark.move(position)
            self._waiters.tell()
        spool.forget(source.folder, position)

    def _say_away(self, away: bool) -> None:
        with self._moved:
            self._waiters.away = away
            self._waiters.tell()


def _settle(future: "asyncio.Future[Flushed]", flushed: Flushed) -> None:
    if not future.done():
        future.set_result(flushed)


def _ends_at_one_moment(ours: Sequence[Slot]) -> Sequence[Position]:
    """Where the writers are. What one of them acknowledged before another got what lies before its end is included.

    Looked at once, one after the other, they could show a correction and not what it corrects.
    """
    ends = [slot.end for slot in ours]
    for _ in range(_LOOKS_AT_ENDS if len(ours) > 1 else 0):
        before, ends = ends, [slot.end for slot in ours]
        if before == ends:
            break
    return ends


def _left_behind(slots_: Slots, *, everywhere: bool) -> list[Path]:
    """The folders of writers of ours that died, and `everywhere` those of all processes that are no more."""
    found = [slot.folder for slot in slots_.ours]
    found += [each for each in slots(slots_.root) if segments(each)] if everywhere else []
    return [folder for folder in dict.fromkeys(found) if not slots_.lives(folder)]


def _take(folder: Path, stack: contextlib.ExitStack) -> Source | None:
    try:
        stack.enter_context(spool.take_slot(folder))
        mark = stack.enter_context(contextlib.closing(FlushedMark(folder / "flushed")))
        return Source(folder, mark, None, segments(folder))
    except BlockingIOError:  # somebody writes there again
        return None
    except OSError as error:
        log.error("spool_not_adopted", folder=str(folder), reason=str(error))
        return None
