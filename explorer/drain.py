"""Moves what the outbox holds into the ledger, which keeps the number of the last record of each file."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from tuneloop.runner.outbox import SUFFIX, Damage, OutboxReader, OutboxReaders, Record, names_in
from tuneloop.shared.errors import LedgerError, LedgerForbidden, LedgerUnavailable, RecordRefused, TuneloopError
from tuneloop.shared.experience import Exchange, Feedback, decode, time_received
from tuneloop.shared.ledger.recording.feedback_results import FeedbackResults
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.outbox_status import OutboxStatus

log = structlog.get_logger()

#: Records that go into the database in one transaction, and their bytes.
GROUP, GROUP_BYTES = 512, 32 << 20

#: How often the files are looked at, the status is told, and the ledger's numbers are compared with ours.
_LOOK_S, _TELL_S, _COMPARE_S = 0.1, 0.5, 10.0

#: How long a drained file is kept: a standby that lagged, and is promoted, is filled from it.
KEEP_S = 600.0

#: How long a record is offered again that the database refuses for what it holds, and the same where nobody can tell
#: whether the record or the database is at fault.
RECORD_PATIENCE_S, PATIENCE_S = 10.0, 900.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

#: So long the drain goes on when it is told to stop. What is left stays on disk for the next start.
STOP_S = 5.0

_Result = TypeVar("_Result")


class _Stopped(Exception):
    """The drain was told to stop while it waited for the database, or has no time left."""


class _Unread(NamedTuple):
    reader: OutboxReader
    record: Record


class DrainListener(Protocol):
    """Hears from the thread of a drain: what became of an owner's feedback, what waits, and what was set aside."""

    def taken(self, owner: str, results: FeedbackResults) -> None: ...  # noqa: D102

    def status(self, status: OutboxStatus, *, away: bool) -> None: ...  # noqa: D102

    def refused(self) -> None: ...  # noqa: D102

    def failed(self, error: TuneloopError) -> None: ...  # noqa: D102


class Drain:
    """One thread that reads the files of the `owners`, and those that dead processes left.

    While the database is away, or forbids it, all waits. A record that the database refuses by itself is offered again
    for some time, and then set aside in the database.
    """

    def __init__(
        self,
        folder: Path,
        recording: Recording,
        listener: DrainListener,
        *,
        keep_s: float = KEEP_S,
        stop_s: float = STOP_S,
    ) -> None:
        self.owners: set[str] = set()
        self._folder, self._recording, self._listener = folder, recording, listener
        self._keep_s, self._stop_s, self._stop_at = keep_s, stop_s, float("inf")
        self._readers = OutboxReaders(folder, self.owners)
        self._numbers: dict[str, int] = {}  # of each file, the last one that the ledger has
        self._drained: dict[str, float] = {}  # since when nothing is left of a file
        self._forget_before = ""
        self._began: dict[str, float] = {}  # since when the database refuses for this reason
        self._refusal: str | None = None
        self._away = False
        self._tell_at = self._compare_at = 0.0
        self._waiting: deque[Future[bool]] = deque()
        self._asked: list[Future[bool]] = []  # before the files were looked at
        self._wake, self._stop = threading.Event(), threading.Event()
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
                self._hear()
                try:
                    self._answer(self._look())
                except _Stopped:
                    self._answer(False)
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
        """Move all that the files hold now. False if some of it could not be read."""
        self._when_there(self._recording.check_place)
        if time.monotonic() >= self._compare_at:
            self._compare_numbers()
        is_clear, before = True, -1
        while before != (before := sum(self._numbers.values())) and is_clear:
            try:
                readers = self._readers.look(but=self._drained)
            except OSError as error:
                log.error("outbox_not_read", folder=str(self._folder), reason=str(error))
                return False
            is_clear = self._move(readers)
            self._let_go()
        self._tell()
        return is_clear

    def _move(self, readers: Sequence[OutboxReader]) -> bool:
        # The ends of all files at about one moment: a reply in one file comes before what another says of it.
        ends = [(reader, reader.size) for reader in readers]
        group: list[_Unread] = []
        size, is_clear = 0, True
        for reader, end in ends:
            try:
                for found in reader.read(reader.taken, end):
                    is_damage = isinstance(found, Damage)
                    if not isinstance(found, Damage):
                        group.append(_Unread(reader, found))
                        size += len(found.payload)
                    if is_damage or len(group) == GROUP or size >= GROUP_BYTES:
                        self._take(group)
                        group, size = [], 0
                    if isinstance(found, Damage):
                        self._set_aside(_Unread(reader, Record(found.data, 0, found.end)), "these bytes are damaged")
            except OSError as error:
                log.error("outbox_not_read", file=str(reader.path), reason=str(error))
                is_clear = False
        self._take(group)
        return is_clear

    def _take(self, group: Sequence[_Unread]) -> None:
        """Put records into the database; those that it refuses are set aside."""
        if group and time.monotonic() >= self._stop_at:
            log.warning("outbox_left_for_the_next_start", reason="there is more than can be moved now")
            raise _Stopped
        records = []
        for index, each in enumerate(group):
            try:
                records.append(decode(each.record.payload))
            except msgspec.MsgspecError as error:
                self._take(group[:index])
                self._set_aside(each, _reason(error))
                self._take(group[index + 1 :])
                return
        places = [(each.reader.id, each.record.number) for each in group]
        pause, refusal = _SHORTEST_PAUSE_S, ""
        while records:
            try:
                results = self._when_there(lambda: self._recording.record(records, places))
            except (LedgerError, ValueError, OverflowError) as error:
                refusal = _reason(error)
                if len(records) > 1:
                    log.warning("group_refused", records=len(records), reason=refusal)
                    for each in group:
                        self._take([each])
                    return
                # Once for all records that are refused for the same reason: a client's mistake that comes a hundred
                # times would hold up everything for a hundred times as long.
                waited_s = time.monotonic() - self._began.setdefault(refusal, time.monotonic())
                longest = RECORD_PATIENCE_S if isinstance(error, RecordRefused) else PATIENCE_S
                if not isinstance(error, LedgerError) or waited_s >= longest:
                    self._set_aside(group[0], refusal)
                    return
                self._wait(pause, refusal)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._began.pop(refusal, None)
                self._note(group)
                said = zip(group, records, strict=True)
                for owner in {each.reader.owner for each, record in said if isinstance(record, Feedback)}:
                    self._listener.taken(owner, results)
                return

    def _set_aside(self, unread: _Unread, reason: str) -> None:
        """Put bytes of a file aside in the database, so that they do not hold up the others for ever."""
        reader, (data, number, end) = unread.reader, (unread.record.payload, unread.record.number, unread.record.end)
        log.error("record_set_aside", file=str(reader.path), end=end, reason=reason)
        self._when_there(lambda: self._recording.refuse(reader.id, number, end, data, reason))
        self._note([unread])
        self._listener.refused()

    def _note(self, group: Sequence[_Unread]) -> None:
        """The database has these records."""
        self._refusal = None
        for reader, record in group:
            reader.taken = record.end
            self._numbers[reader.id] = max(self._numbers.get(reader.id, 0), record.number)

    def _when_there(self, call: Callable[[], _Result]) -> _Result:
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
        self._refusal = refusal
        self._tell()
        if self._away or refusal is not None:
            self._hear()
            self._answer(False)
        if self._stop.wait(pause):
            raise _Stopped

    def _hear(self) -> None:
        self._asked += [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _answer(self, is_clear: bool) -> None:
        for waiter in self._asked:
            with contextlib.suppress(InvalidStateError):  # it has given up
                waiter.set_result(is_clear)
        self._asked = []

    def _compare_numbers(self) -> None:
        """Read again what the ledger has lost: a standby was promoted that lagged, or a backup was restored."""
        files = list(self._numbers)
        known = self._when_there(lambda: self._recording.taken_numbers(files))
        for file in files:
            if (has := known.get(file, 0)) < self._numbers[file]:
                log.error("ledger_lost_records", file=file, had=self._numbers[file], has=has)
                self._numbers[file] = has
                self._drained.pop(file, None)
                for reader in self._readers.files:
                    reader.taken = 0 if reader.id == file else reader.taken
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
            del self._drained[file]
            self._numbers.pop(file, None)
        if gone:
            self._when_there(lambda: self._recording.note_removed(gone))

    def _tell(self) -> None:
        """Tell the status, if that was not done just now."""
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + _TELL_S
        files = records = size = 0
        since: float | None = None
        with contextlib.suppress(OSError):
            files = len(names_in(self._folder))
            for reader in self._readers.files:
                if (waits := reader.size - reader.taken) > 0:
                    size, records = size + waits, records + reader.last_number() - self._numbers.get(reader.id, 0)
                    since = _oldest(reader) if since is None else since
        self._listener.status(OutboxStatus(files, records, size, since, 0, self._refusal), away=self._away)


def _oldest(reader: OutboxReader) -> float:
    """When the first record that waits was received."""
    for found in reader.read(reader.taken):
        with contextlib.suppress(msgspec.MsgspecError):
            if isinstance(found, Record):
                record = decode(found.payload)
                return time_received(record) + (record.latency_s if isinstance(record, Exchange) else 0.0)
    return reader.path.stat().st_mtime


def _reason(error: Exception) -> str:
    """In one line: the next ones may quote what a user wrote."""
    return (str(error).splitlines() or [type(error).__name__])[0]
