"""Puts groups of records into the database: waits while it is away or refuses, gives a record up only after that."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from tuneloop.shared import steady_time
from tuneloop.shared.errors import LedgerError, LedgerForbidden, LedgerUnavailable, RecordRefused
from tuneloop.shared.experience import Record, decode
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.quarantine import set_aside
from tuneloop.shared.spool_format import Refusal, note_refusal

log = structlog.get_logger()

#: How long a record is offered again that the database refuses for what it holds, before it goes to quarantine.
RECORD_PATIENCE_S = 10.0
#: The same, where nobody can tell whether the record or the database is at fault.
PATIENCE_S = 900.0

_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

#: It cannot even be made a row.
_NO_ROW = (ValueError, OverflowError)


class Patience:
    """How long a refusal is waited out, once for all records that are refused for the same reason.

    Else a client's mistake that comes a hundred times would hold everything else up for a hundred times as long.
    `clock` must not jump.
    """

    def __init__(
        self,
        record_s: float = RECORD_PATIENCE_S,
        other_s: float = PATIENCE_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record_s = record_s
        self._other_s = other_s
        self._clock = clock
        self._began: dict[str, float] = {}

    def waits(self, error: LedgerError) -> bool:
        """Whether the record that is refused by `error` is to be offered again."""
        longest = self._record_s if isinstance(error, RecordRefused) else self._other_s
        return self._clock() - self._began.setdefault(_reason(error), self._clock()) < longest

    def forget(self, error: LedgerError) -> None:
        """What was refused by `error` was taken after all: the next one is waited out again."""
        self._began.pop(_reason(error), None)


class Intake:
    """The database's side of the flusher, in its thread.

    `say_away` hears whether the database takes what it is given, `quarantined` is called for each record given up; all
    waiting ends when `stop` is set.
    """

    def __init__(
        self,
        recording: Recording,
        root: Path,
        *,
        stop: threading.Event,
        patience: Patience,
        quarantined: Callable[[], None],
        say_away: Callable[[bool], None],
    ) -> None:
        self._recording = recording
        self._root = root
        self._stop = stop
        self._patience = patience
        self._quarantined = quarantined
        self._say_away = say_away
        self._refusal: Refusal | None = None
        self._misplaced = False

    def move(self, group: Sequence[tuple[Path, bytes]]) -> bool:
        """Put records, each with its slot, into the database; False if we were told to stop while it was away."""
        records: list[Record] = []
        slots: list[Path] = []
        for folder, payload in group:
            try:
                records.append(decode(payload))
                slots.append(folder)
            except msgspec.MsgspecError as error:
                self._set_aside(folder, payload, error)
        try:
            return not records or self._record(records, slots)
        except (LedgerError, *_NO_ROW) as error:
            log.warning("group_refused", records=len(records), reason=_reason(error))
        return all(self._one(folder, payload) for folder, payload in group)

    def look(self) -> None:
        """See whether the database is where it was, so that all know before there is something to move."""
        try:
            self._recording.check_place()
        except LedgerForbidden as error:
            self._misplaced = True
            self._refuse(_reason(error))
        else:
            if self._misplaced:
                self._misplaced = False
                self._refuse(None)

    def note(self, refusal: Refusal | None) -> None:
        """Let everybody see whether, and why, the database refuses."""
        self._refusal = refusal
        try:
            note_refusal(self._root, refusal)
        except OSError as error:  # the spool's own disk is worse news, and told elsewhere
            log.error("refusal_not_noted", reason=str(error))

    def _record(self, records: Sequence[Record], slots: Sequence[Path]) -> bool:
        pause = _SHORTEST_PAUSE_S
        while True:
            try:
                self._recording.record(records)
            except LedgerUnavailable as error:
                if isinstance(error, LedgerForbidden):
                    self._refuse(_reason(error))
                if pause == _SHORTEST_PAUSE_S:
                    log.warning("database_away", reason=_reason(error))
                else:
                    self._say_away(True)  # not at the first failure, which may be no more than a broken connection
                if self._stop.wait(pause):
                    return False
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._say_away(False)
                self._refuse(None)
                return True

    def _one(self, folder: Path, payload: bytes) -> bool:
        """Find the one record that the database refuses, and keep it from blocking the others for ever."""
        try:
            records = [decode(payload)]
        except msgspec.MsgspecError:
            return True  # already set aside
        pause, last = _SHORTEST_PAUSE_S, None
        while True:
            try:
                moved = self._record(records, [folder])
            except _NO_ROW as error:
                self._set_aside(folder, payload, error)
                return True
            except LedgerError as error:
                if not self._patience.waits(error):
                    self._set_aside(folder, payload, error)
                    return True
                last = error
            else:
                if last is not None and moved:
                    self._patience.forget(last)
                return moved
            self._refuse(_reason(last))
            self._say_away(True)
            if self._stop.wait(pause):
                return False
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _refuse(self, reason: str | None) -> None:
        """Note a reason that is another than before; None: the database takes what it is given."""
        if (self._refusal.reason if self._refusal else None) != reason:
            since = self._refusal.since if self._refusal else steady_time.now()
            self.note(None if reason is None else Refusal(reason, since))

    def _set_aside(self, folder: Path, payload: bytes, error: Exception) -> None:
        log.error("record_quarantined", folder=str(folder), reason=_reason(error))
        set_aside(folder, payload)
        self._refuse(None)
        self._quarantined()


def _reason(error: Exception) -> str:
    """In one line: the next ones may quote what a user wrote."""
    return (str(error).splitlines() or [type(error).__name__])[0]
