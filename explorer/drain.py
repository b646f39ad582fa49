"""Moves what the outbox holds into the ledger, which remembers the number of the last record of each file."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from tuneloop.runner.outbox import SUFFIX, Damage, OutboxReader, OutboxReaders, Record, names_in
from tuneloop.shared import steady_time
from tuneloop.shared.errors import LedgerError, LedgerForbidden, LedgerUnavailable, RecordRefused, TuneloopError
from tuneloop.shared.experience import Exchange, Feedback, decode, time_received
from tuneloop.shared.ledger.recording.feedback_results import FeedbackResults
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.outbox_status import OutboxStatus

log = structlog.get_logger()

#: Records that go into the database in one transaction, and their bytes.
GROUP, GROUP_BYTES = 512, 32 << 20

#: How often files are looked at: what comes meanwhile goes into the database together. Feedback wakes the drain.
_LOOK_S = 0.1
#: How often the status is told, and how often the ledger's numbers are compared with ours.
_TELL_S, _COMPARE_S = 0.5, 10.0

#: How long a drained file is kept: a standby that lagged, and is promoted, is filled from it.
KEEP_S = 600.0

#: How long a record is offered again that the database refuses for what it holds, and the same where nobody can tell
#: whether the record or the database is at fault.
RECORD_PATIENCE_S, PATIENCE_S = 10.0, 900.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

#: So long the drain goes on when it is told to stop. What is left stays on disk for the next start.
STOP_S = 5.0

#: A record cannot even be made a row.
_NO_ROW = (ValueError, OverflowError)

_Result = TypeVar("_Result")


class _Stopped(Exception):
    """The drain was told to stop while the database was away."""


class _Unread(NamedTuple):
    reader: OutboxReader
    record: Record


class DrainListener:
    """Hears from the thread of a drain. `away`: the database did not take what it was last given."""

    def taken(self, owner: str, results: FeedbackResults) -> None:
        """Feedback that this owner appended is in the database."""

    def status(self, status: OutboxStatus, *, away: bool) -> None:
        """What waits now."""

    def refused(self) -> None:
        """A record was set aside."""

    def failed(self, error: TuneloopError) -> None:
        """The drain cannot go on."""


class Drain:
    """One thread that reads the files of the `owners`, and those that dead processes left.

    While the database is away, or forbids it, all waits. A record that the database refuses by itself is offered again
    for some time, and then set aside in the database.
    """

    def __init__(
        self, folder: Path, recording: Recording, listener: DrainListener, *, keep_s: float = KEEP_S, stop_s: float = STOP_S
    ) -> None:
        self.owners: set[str] = set()
        self._recording, self._listener = recording, listener
        self._keep_s, self._stop_s, self._stop_at = keep_s, stop_s, float("inf")
        self._readers = OutboxReaders(folder, self.owners)
        self._folder = folder
        self._numbers: dict[str, int] = {}  # of each file, the last one that the ledger has
        self._scanned: dict[str, tuple[int, int]] = {}  # how far records were counted, and the number of the last
        self._drained: dict[str, float] = {}  # since when nothing is left of a file
        self._forget_before = ""
        self._began: dict[str, float] = {}  # since when the database refuses for this reason
        self._refusal: str | None = None
        self._away = False
        self._tell_at = self._compare_at = 0.0
        self._waiting: list[asyncio.Future[bool]] = []
        self._asked: list[asyncio.Future[bool]] = []  # before the files were looked at
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

    def start(self) -> None:
        """Begin with what dead processes left behind, then follow the owners."""
        self._thread.start()

    def stop(self) -> None:
        """Move what is there, for `stop_s` and unless the database is away: the rest waits for the next start."""
        self._stop_at = time.monotonic() + self._stop_s
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        """Look at the files now: somebody waits for what they hold."""
        self._wake.set()

    def forget(self) -> None:
        """Keep no file that there is now once it is drained: a person was erased."""
        self._forget_before = f"{time.time_ns():020d}"

    async def wait_until_taken(self, timeout_s: float) -> bool:
        """Wait until all that is on disk now is in the database. False if it is not by then, or away."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append(waiter)
        self._wake.set()
        # Not in a thread: a slow database would soon have all of the pool's waiting for it.
        await asyncio.wait([waiter], timeout=timeout_s)
        return waiter.done() and waiter.result()

    def _run(self) -> None:
        try:
            while True:
                is_last = self._stop.is_set()
                self._wake.clear()
                with self._lock:
                    self._asked, self._waiting = self._waiting, []
                with contextlib.suppress(_Stopped):
                    self._answer(self._look())
                if is_last:
                    return
                self._wake.wait(_LOOK_S)
        except TuneloopError as error:
            self._listener.failed(error)
        except Exception as error:
            log.exception("drain_failed")
            self._listener.failed(LedgerError(f"the outbox cannot be moved into the database: {error!r}"))
        finally:
            self._readers.close_all()

    def _look(self) -> bool:
        """Move all that the files hold now. False if some of it could not be read, or there was no time."""
        self._recording_there(self._recording.check_place)
        if time.monotonic() >= self._compare_at:
            self._compare_numbers()
        is_clear = True
        while readers := [each for each in self._look_at_files() if each.size > each.taken]:
            before = [each.taken for each in readers]
            is_clear = self._move(readers)
            if not is_clear or before == [each.taken for each in readers]:
                break
        self._let_go()
        self._tell()
        return is_clear

    def _look_at_files(self) -> Sequence[OutboxReader]:
        try:
            return self._readers.look(but=self._drained)
        except OSError as error:
            log.error("outbox_not_read", folder=str(self._folder), reason=str(error))
            return ()

    def _move(self, readers: Sequence[OutboxReader]) -> bool:
        # The ends of all files at about one moment: a reply that is in one file comes before what is said of it in another.
        ends = {reader: reader.size for reader in readers}
        group: list[_Unread] = []
        size, is_clear = 0, True
        for reader, end in ends.items():
            try:
                for found in reader.read(reader.taken, end):
                    if isinstance(found, Damage):
                        self._take(group)
                        group, size = [], 0
                        self._refuse(reader, found.end, found.data, f"{len(found.data)} bytes are damaged")
                        continue
                    group.append(_Unread(reader, found))
                    size += len(found.payload)
                    if len(group) == GROUP or size >= GROUP_BYTES:
                        self._take(group)
                        group, size = [], 0
                        if time.monotonic() >= self._stop_at:
                            log.warning("outbox_left_for_the_next_start", reason="there is more than can be moved now")
                            return False
            except OSError as error:
                log.error("outbox_not_read", file=str(reader.path), reason=str(error))
                is_clear = False
        self._take(group)
        return is_clear

    def _take(self, group: Sequence[_Unread]) -> None:
        """Put records into the database; those that it refuses are set aside."""
        readable = []
        for each in group:
            try:
                readable.append((decode(each.record.payload), (each.reader.id, each.record.number)))
            except msgspec.MsgspecError as error:
                self._refuse(each.reader, each.record.end, each.record.payload, _reason(error), each.record.number)
        pause, waited_for = _SHORTEST_PAUSE_S, ""
        while readable:
            records, places = zip(*readable, strict=True)
            try:
                results = self._recording_there(lambda: self._recording.record(records, places))  # noqa: B023
            except (LedgerError, *_NO_ROW) as error:
                if len(group) > 1:
                    log.warning("group_refused", records=len(group), reason=_reason(error))
                    for each in group:
                        self._take([each])
                    return
                if self._is_over(error):
                    self._refuse(group[0].reader, group[0].record.end, group[0].record.payload, _reason(error), places[0][1])
                    return
                self._wait(pause, waited_for := _reason(error))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._refusal = None
                self._began.pop(waited_for, None)
                self._note(group)
                for owner in {_owner(file) for record, (file, _) in readable if isinstance(record, Feedback)}:
                    self._listener.taken(owner, results)
                return

    def _note(self, group: Sequence[_Unread]) -> None:
        """The database has these records."""
        for reader, record in group:
            reader.taken = max(reader.taken, record.end)
            self._numbers[reader.id] = max(self._numbers.get(reader.id, 0), record.number)

    def _refuse(self, reader: OutboxReader, end: int, data: bytes, reason: str, number: int = 0) -> None:
        """Set bytes of a file aside, so that they do not hold up the others for ever."""
        log.error("record_set_aside", file=str(reader.path), end=end, reason=reason)
        self._recording_there(lambda: self._recording.refuse(reader.id, number, end, data, reason))
        self._note([_Unread(reader, Record(data, number, end))])
        self._refusal = None
        self._listener.refused()

    def _recording_there(self, call: Callable[[], _Result]) -> _Result:
        """What a verb of the ledger returns, once the database is there. Raises _Stopped."""
        pause = _SHORTEST_PAUSE_S
        while True:
            try:
                result = call()
            except LedgerUnavailable as error:
                # Not at the first failure, which may be no more than a broken connection.
                self._away = pause > _SHORTEST_PAUSE_S
                if not self._away:
                    log.warning("database_away", reason=_reason(error))
                self._wait(pause, _reason(error) if isinstance(error, LedgerForbidden) else None)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._away = False
                return result

    def _wait(self, pause: float, refusal: str | None) -> None:
        """Wait before something is offered again. Raises _Stopped."""
        if refusal != self._refusal:
            self._tell_at = 0.0
        self._refusal = refusal
        self._tell()
        if self._away or refusal is not None:
            with self._lock:
                self._asked += self._waiting
                self._waiting = []
            self._answer(False)
        if self._stop.wait(pause):
            raise _Stopped

    def _answer(self, is_clear: bool) -> None:
        for waiter in self._asked:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                waiter.get_loop().call_soon_threadsafe(_settle, waiter, is_clear)
        self._asked = []

    def _is_over(self, error: Exception) -> bool:
        """Whether a record was offered long enough: once for all records that are refused for the same reason.

        Else a client's mistake that comes a hundred times would hold up everything for a hundred times as long.
        """
        longest = 0.0 if isinstance(error, _NO_ROW) else RECORD_PATIENCE_S if isinstance(error, RecordRefused) else PATIENCE_S
        return time.monotonic() - self._began.setdefault(_reason(error), time.monotonic()) >= longest

    def _compare_numbers(self) -> None:
        """Read again from the start what the ledger has lost: a standby was promoted that lagged, or a backup restored."""
        files = {*self._numbers}
        known = self._recording_there(lambda: self._recording.taken_numbers(files)) if files else {}
        lost = {file for file in files if known.get(file, 0) < self._numbers[file]}
        for reader in self._readers.files:
            reader.taken = 0 if reader.id in lost else reader.taken
        for file in lost:
            log.error("ledger_lost_records", file=file, had=self._numbers[file], has=known.get(file, 0))
            self._drained.pop(file, None)
            self._numbers[file] = known.get(file, 0)
        self._compare_at = time.monotonic() + _COMPARE_S

    def _let_go(self) -> None:
        """Close the files that are drained, and remove those that are not kept any more."""
        now = time.monotonic()
        for reader in self._readers.files:
            if reader.is_claimed and reader.taken >= reader.size:
                self._drained[reader.id] = now
                self._readers.close(reader)
        gone = [file for file, at in self._drained.items() if now - at >= self._keep_s or file < self._forget_before]
        for file in gone:
            with contextlib.suppress(OSError):
                (self._folder / f"{file}{SUFFIX}").unlink(missing_ok=True)
        if gone:
            self._recording_there(lambda: self._recording.note_removed(gone))
        for file in gone:
            for known in (self._drained, self._numbers, self._scanned):
                known.pop(file, None)  # type: ignore[attr-defined]

    def _tell(self) -> None:
        """Tell the status, if that was not done just now."""
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + _TELL_S
        files = records = size = 0
        since: float | None = None
        with contextlib.suppress(OSError):
            for reader in [each for each in self._readers.files if each.size > each.taken]:
                size += reader.size - reader.taken
                records += self._count(reader)
                since = _oldest(reader) if since is None else since
            files = len(names_in(self._folder))
        self._listener.status(OutboxStatus(files, records, size, since, 0, self._refusal), away=self._away)

    def _count(self, reader: OutboxReader) -> int:
        """How many records of a file wait."""
        taken = self._numbers.get(reader.id, 0)
        offset, last = max(self._scanned.get(reader.id, (0, 0)), (reader.taken, taken))
        for found in reader.read(offset):
            offset, last = found.end, getattr(found, "number", last)
        self._scanned[reader.id] = offset, last
        return last - taken


def _oldest(reader: OutboxReader) -> float:
    """When the first record that waits was received."""
    for found in reader.read(reader.taken):
        with contextlib.suppress(msgspec.MsgspecError):
            record = decode(found.payload if isinstance(found, Record) else found.data)
            return time_received(record) + (record.latency_s if isinstance(record, Exchange) else 0.0)
        break
    return reader.path.stat().st_mtime


def _owner(file: str) -> str:
    return file.partition("-")[2].partition("-")[0]


def _settle(waiter: "asyncio.Future[bool]", is_clear: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_clear)


def _reason(error: Exception) -> str:
    """In one line: the next ones may quote what a user wrote."""
    return (str(error).splitlines() or [type(error).__name__])[0]
