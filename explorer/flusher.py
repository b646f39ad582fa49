"""Moves what the spool holds into the ledger, in order, as soon as the database takes it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from explorer import spool
from explorer.spool import FlushedMark, Position, Spool
from shared.errors import LedgerError, LedgerUnavailable, TuneloopError
from shared.experience import Record, decode
from shared.ledger import Ledger

log = structlog.get_logger()

#: Records that go into the database in one transaction.
GROUP = 512
#: How often a record is offered to the database before it goes to quarantine.
TRIES = 5

_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_DISK_PAUSE_S = 0.5

#: The database refuses a record, or it cannot even be made a row.
_REFUSED = (LedgerError, ValueError, OverflowError)


class Flusher:
    """One thread that reads the spool behind the writer.

    `quarantined` is called once for each record that the database refuses again and again, `failed` if the thread
    cannot go on.
    """

    def __init__(
        self,
        own: Spool,
        ledger: Ledger,
        *,
        quarantined: Callable[[], None],
        failed: Callable[[TuneloopError], None],
    ) -> None:
        self._spool = own
        self._ledger = ledger
        self._quarantined = quarantined
        self._failed = failed
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._away = False
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)

    def start(self) -> None:
        """Begin with what dead processes left behind, oldest first, then follow the writer."""
        self._thread.start()

    def stop(self) -> None:
        """Move what is there, unless the database is away: then it stays in the spool for the next start."""
        self._stop.set()
        self._spool.grown.set()
        self._thread.join()

    async def caught_up(self, position: Position, timeout_s: float) -> bool:
        """Wait until everything before `position` is in the database; False if that is away, or it is not by then."""
        return await asyncio.to_thread(self._wait, position, timeout_s)

    def _wait(self, position: Position, timeout_s: float) -> bool:
        with self._moved:
            self._moved.wait_for(lambda: self._away or self._spool.flushed.position >= position, timeout_s)
            return self._spool.flushed.position >= position

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            log.exception("flusher_failed")
            self._failed(LedgerError(f"the spool cannot be moved into the database: {error!r}"))

    def _follow(self) -> None:
        for folder in spool.slots(self._spool.folder.parent):
            if folder != self._spool.folder and not self._stop.is_set():
                self._adopt(folder)
        while True:
            self._spool.grown.clear()
            stopping = self._stop.is_set()
            all_moved = self._drained(self._spool.folder, self._spool.flushed)
            if stopping or (self._stop.is_set() and not all_moved):
                return
            self._spool.grown.wait()

    def _drained(self, folder: Path, mark: FlushedMark) -> bool:
        try:
            return self._drain(folder, mark)
        except OSError as error:  # such as no place for the quarantine: what is not marked is read again
            log.error("spool_not_drained", folder=str(folder), reason=str(error))
            self._stop.wait(_DISK_PAUSE_S)
            self._spool.grown.set()
            return False

    def _adopt(self, folder: Path) -> None:
        """Drain the spool of a process that is no more."""
        try:
            with spool.take_slot(folder):
                mark = FlushedMark(folder / "flushed")
                self._drained(folder, mark)
                mark.close()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("spool_not_adopted", folder=str(folder), reason=str(error))

    def _drain(self, folder: Path, mark: FlushedMark) -> bool:
        """Move what there is; False if we were told to stop while the database was away."""
        end = self._spool.end if folder == self._spool.folder else None
        group: list[bytes] = []
        position = mark.position
        for payload, position in spool.read(folder, mark.position, end):
            group.append(payload)
            if len(group) == GROUP:
                if not self._move(folder, group):
                    return False
                self._mark(folder, mark, position)
                group = []
        if group and not self._move(folder, group):
            return False
        # What lies between the last record and the end was torn by a crash, or is a segment still empty.
        reached = max(end or mark.position, position)
        if reached > mark.position:
            self._mark(folder, mark, reached)
        return True

    def _mark(self, folder: Path, mark: FlushedMark, position: Position) -> None:
        with self._moved:
            mark.move(position)
            self._moved.notify_all()
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
                self._ledger.record(records)
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
            self._moved.notify_all()

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
