"""Moves the records of the outbox into the ledger, which stores the number of each file's last record."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tuneloop.runner.outbox import SUFFIX, Damage, OutboxReader, Record, names_in, owner_of
from tuneloop.shared import errors
from tuneloop.shared.errors import LedgerError, TuneloopError, first_line
from tuneloop.shared.experience import Feedback, decode
from tuneloop.shared.ledger.recording.feedback import FeedbackResults
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.outbox_status import OutboxStatus, file_status

log = structlog.get_logger()

#: Records that go into the database in one transaction, and their bytes.
GROUP, GROUP_BYTES = 512, 32 << 20

#: Seconds between reads of the files, between status reports, and between comparisons with the ledger's numbers.
_LOOK_S, _TELL_S, _COMPARE_S = 0.1, 0.5, 10.0

#: Seconds for which a drained file is kept, to refill a standby that lagged before its promotion. Below `_ROOM_BYTES`
#: of free space no drained file is kept, because the recorder leaves up to half as many.
KEEP_S, _ROOM_BYTES = 600.0, 2 << 30

#: Seconds for which a refused record is retried: where the database refuses its content, and where the cause may be the
#: record or the database.
RECORD_PATIENCE_S, PATIENCE_S = 10.0, 900.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

#: Seconds for which the drain continues after `stop`. The remaining records stay on disk for the next start.
STOP_S = 5.0

_Result = TypeVar("_Result")


class _Stopped(Exception):
    """The drain was stopped while it waited for the database, or has no time left."""


#: The id of a file, and a record read from it.
_Unread = tuple[str, Record]


class Drain:
    """A thread that reads the outbox files of the `owners`, and the files of dead processes.

    The drain waits while the database is unavailable or forbids writes. It retries a record that the database
    refuses, then sets the record aside in the database. Its thread calls `taken` with an owner and the results of
    its feedback, `tell` with the backlog and whether the database is unavailable, `refused` for each record set
    aside, and `failed` when it cannot continue.
    """

    def __init__(
        self,
        folder: Path,
        recording: Recording,
        *,
        taken: Callable[[str, FeedbackResults], None],
        tell: Callable[[OutboxStatus, bool], None],
        refused: Callable[[], None],
        failed: Callable[[TuneloopError], None],
        keep_s: float = KEEP_S,
    ) -> None:
        self.owners: set[str] = set()
        self._folder, self._recording = folder, recording
        self._taken, self._report, self._refused, self._failed = taken, tell, refused, failed
        self._keep_s, self._stop_at = keep_s, float("inf")
        self._offsets: dict[str, int] = {}  # by file: the offset up to which the ledger has its records
        self._numbers: dict[str, int] = {}  # by file: the number of the last record in the ledger
        self._others: set[str] = set()  # files that another service drains
        self._unreadable: set[str] = set()
        self._drained: dict[str, float] = {}  # by file: when its last record was drained
        self._forgotten: Collection[str] = ()  # files that are removed as soon as they are drained
        self._began: dict[str, float] = {}  # by reason: since when the database refuses
        self._refusal: str | None = None
        self._away = False
        self._tell_at = self._compare_at = 0.0
        #: When the database last answered, or was not needed.
        self.moved_at = time.monotonic()
        self._waiting: deque[Future[bool]] = deque()
        self._asked: list[Future[bool]] = []  # waiters from before the files were read
        self._wake, self._stop = threading.Event(), threading.Event()
        #: Makes the drain read the files now: a request waits for their records.
        self.wake = self._wake.set
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

    def start(self) -> None:
        """Drain the files of dead processes, then those of the owners."""
        self._thread.start()

    def stop(self) -> None:
        """Drain for at most STOP_S, and not while the database is unavailable; the rest waits for the next start."""
        self._stop_at = time.monotonic() + STOP_S
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def forget(self) -> None:
        """Remove every present file as soon as it is drained, because a person was erased. Raises OSError."""
        self._forgotten = {name.removesuffix(SUFFIX) for name in names_in(self._folder)}

    async def wait_until_taken(self, timeout_s: float) -> bool:
        """Wait until the database has all records on disk. Returns False on timeout or while it is unavailable."""
        waiter: Future[bool] = Future()
        self._waiting.append(waiter)
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.wrap_future(waiter), timeout_s)
        return False

    def _run(self) -> None:
        try:
            while True:
                is_last = self._stop.is_set()
                self._wake.clear()
                self._asked = self._new_waiters()
                try:
                    self._answer(self._look())
                except _Stopped:
                    self._answer(False)
                if is_last:
                    return
                self._wake.wait(_LOOK_S)
        except TuneloopError as error:
            self._failed(error)
        except Exception as error:
            log.exception("drain_failed")
            self._failed(LedgerError(f"the outbox cannot be moved into the database: {error!r}"))

    def _look(self) -> bool:
        """Move all records that the files hold now. Returns False if a file could not be read."""
        self._when_there(self._recording.check_place)
        self._refusal = None
        if time.monotonic() >= self._compare_at:
            self._compare_numbers()
        is_clear = False
        try:
            is_clear = self._move()
            self._remove()
        except errors.RecordsLost:
            self._compare_at = 0.0
        except OSError as error:
            log.error("outbox_not_read", folder=str(self._folder), reason=str(error))
        self._tell()
        return is_clear

    def _unread(self) -> list[tuple[Path, int]]:
        """Return the files that are not drained, oldest first, with their sizes. Raises OSError."""
        found = []  # sizes are read first: a reply in one file precedes its feedback in another
        for name in names_in(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another service has removed the file
                file, end = (path := self._folder / name).stem, path.stat().st_size
                if end > self._offsets.get(file, 0):
                    self._drained.pop(file, None)  # the file was found before its owner had locked it
                if file not in self._drained:
                    found.append((path, end))
        return found

    def _move(self) -> bool:
        group, size, is_clear, finished = list[_Unread](), 0, True, list[str]()
        for path, end in self._unread():
            try:
                with contextlib.closing(OutboxReader(path)) as reader:
                    if not reader.claim() and reader.owner not in self.owners:
                        self._others.add(reader.id)
                        continue
                    self._others.discard(reader.id)
                    for found in reader.read(self._offsets.get(reader.id, 0), end):
                        if isinstance(found, Record):
                            group.append((reader.id, found))
                            size += len(found.payload)
                        if isinstance(found, Damage) or len(group) == GROUP or size >= GROUP_BYTES:
                            self._take(group)
                            group, size = [], 0
                        if isinstance(found, Damage):
                            number = self._numbers.get(reader.id, 0)
                            self._set_aside(reader.id, Record(found.data, number, found.end), "these bytes are damaged")
                    if reader.is_claimed and reader.size == end:
                        finished.append(reader.id)
                        if not end:  # its owner, which may not have locked it yet, must not append to a drained file
                            path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                if path.stem not in self._unreadable:
                    log.error("outbox_not_read", file=str(path), reason=str(error))
                    self._unreadable.add(path.stem)
                is_clear = is_clear and owner_of(path.stem) not in self.owners
        self._take(group)
        self._drained.update(dict.fromkeys(finished, time.monotonic()))
        return is_clear

    def _take(self, group: Sequence[_Unread]) -> None:
        """Write records into the database; set aside the records that it refuses."""
        if group and time.monotonic() >= self._stop_at:
            log.warning("outbox_left_for_the_next_start", reason="there is more than can be moved now")
            raise _Stopped
        records = []
        for index, (file, record) in enumerate(group):
            try:
                records.append(decode(record.payload))
            except msgspec.MsgspecError as error:
                self._take(group[:index])
                self._set_aside(file, record, first_line(error))
                self._take(group[index + 1 :])
                return
        places = [(file, record.number) for file, record in group]
        pause, refusal = _SHORTEST_PAUSE_S, ""
        while records:
            try:
                results = self._when_there(lambda: self._recording.record(records, places, self._numbers))
            except (LedgerError, ValueError, OverflowError) as error:
                refusal = first_line(error)
                if len(records) > 1:
                    log.warning("group_refused", records=len(records), reason=refusal)
                    for each in group:
                        self._take([each])
                    return
                # The wait counts once per reason: a hundred records with one mistake would delay all others a hundred
                # times as long.
                waited_s = time.monotonic() - self._began.setdefault(refusal, time.monotonic())
                longest = RECORD_PATIENCE_S if isinstance(error, errors.RecordRefused) else PATIENCE_S
                if not isinstance(error, LedgerError) or waited_s >= longest:
                    self._set_aside(*group[0], refusal)
                    return
                self._wait(pause, refusal)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._began.pop(refusal, None)
                self._note(group)
                self._tell()
                said = zip(group, records, strict=True)
                for owner in {owner_of(file) for (file, _), record in said if isinstance(record, Feedback)}:
                    self._taken(owner, results)
                return

    def _set_aside(self, file: str, record: Record, reason: str) -> None:
        log.error("record_set_aside", file=file, end=record.end, reason=reason)
        place = file, record.number, record.end
        self._when_there(lambda: self._recording.refuse(*place, record.payload, reason, self._numbers))
        self._note([(file, record)])
        self._refused()

    def _note(self, group: Sequence[_Unread]) -> None:
        """Note that the database has these records."""
        self._refusal = None
        for file, record in group:
            self._offsets[file], self._numbers[file] = record.end, max(self._numbers.get(file, 0), record.number)

    def _when_there(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of `call`, retried until the database is available. Raises _Stopped."""
        pause = _SHORTEST_PAUSE_S
        while True:
            try:
                result = call()
            except errors.LedgerUnavailable as error:
                # The first failure may be only a broken connection.
                self._away = pause > _SHORTEST_PAUSE_S
                if not self._away:
                    log.warning("database_away", reason=first_line(error))
                self._wait(pause, first_line(error) if isinstance(error, errors.LedgerForbidden) else None)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._away = False
                return result

    def _wait(self, pause: float, refusal: str | None) -> None:
        """Wait before a retry. Raises _Stopped."""
        self._refusal = refusal
        self._tell()
        if self._away or refusal is not None:
            self._answer(False, *self._new_waiters())
        if self._stop.wait(pause):
            raise _Stopped

    def _new_waiters(self) -> list[Future[bool]]:
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _answer(self, is_clear: bool, *others: Future[bool]) -> None:
        for waiter in (*self._asked, *others):
            with contextlib.suppress(InvalidStateError):  # the waiter has timed out
                waiter.set_result(is_clear)
        self._asked = []

    def _compare_numbers(self) -> None:
        files = list(self._numbers)
        known = self._when_there(lambda: self._recording.taken_numbers(files))
        for file in files:
            if (has := known.get(file, 0)) < self._numbers[file]:
                log.error("ledger_lost_records", file=file, had=self._numbers[file], has=has)
                self._numbers[file], self._offsets[file] = has, 0
                self._drained.pop(file, None)
        self._compare_at = time.monotonic() + _COMPARE_S

    def _remove(self) -> None:
        """Remove the drained files whose retention has ended. Raises OSError."""
        disk = os.statvfs(self._folder)
        before = time.monotonic() - (self._keep_s if disk.f_bavail * disk.f_frsize > _ROOM_BYTES else 0.0)
        if not (gone := [file for file, at in self._drained.items() if at <= before or file in self._forgotten]):
            return
        self._compare_numbers()  # the ledger may have lost records since
        removed = []
        for file in (file for file in gone if file in self._drained):
            try:
                (self._folder / f"{file}{SUFFIX}").unlink(missing_ok=True)
            except OSError:  # a file that stays and is forgotten would be drained again
                continue
            removed.append(file)
            for known in (self._drained, self._offsets, self._numbers):
                known.pop(file, None)
        self._when_there(lambda: self._recording.note_removed(removed))

    def _tell(self) -> None:
        """Report the backlog at most every _TELL_S, and more rarely when counting it is slow."""
        self.moved_at = time.monotonic()
        if (began := time.monotonic()) < self._tell_at:
            return
        waits = OutboxStatus(refusal=self._refusal)
        with contextlib.suppress(OSError):
            for path, end in self._unread():
                file, offset = path.stem, self._offsets.get(path.stem, 0)
                if file not in self._others | self._unreadable and end > offset:
                    waits = waits.plus(file_status(path, self._numbers.get(file, 0), offset))
        self._report(waits, self._away)
        self._tell_at = max(began + _TELL_S, time.monotonic() + 20 * (time.monotonic() - began))
