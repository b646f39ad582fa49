"""Alarms of which each machine has its own, of clock and spool: their reasons begin with what they are about."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.ledger.storage.transactions import Transactions
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.operations.clock_skew import CLOCK_SKEW, ClockSkew
from tuneloop.shared.spool_format import SpoolStatus

log = structlog.get_logger()

REFUSES, QUARANTINED = "database_refuses", "records_quarantined"


def _write_own_alarm(alarms: Alarms, name: str, reason: str | None, *, about: str) -> None:
    """Raise the alarm of a name with a reason, which begins with `about`; None clears it, where it is about that.

    Raises LedgerError.
    """
    if reason is not None:
        if alarms.raise_alarm(Alarm(name, reason)):
            log.error("alarm_raised", name=name, reason=reason)
    elif any(each.name == name and each.reason.startswith(about) for each in alarms.all()):
        alarms.clear(name)


class ClockAlarm:
    """Compares this machine's clock `wall`, and the database's, with the ledger's time."""

    def __init__(
        self, transactions: Transactions, alarms: Alarms, metrics: Metrics, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._transactions = transactions
        self._alarms = alarms
        self._metrics = metrics
        self._wall = wall
        self._prefix = f"{socket.gethostname()}: "
        self._was_wrong: bool | None = None

    def update(self) -> None:
        """Show the differences, and raise or clear the alarm. Raises LedgerError."""
        self._transactions.keep_time()
        skew = ClockSkew(self._wall() - self._transactions.time(), self._transactions.clock_skew())
        self._metrics.clock_skew.labels("machine").set(skew.machine_s)
        self._metrics.clock_skew.labels("database").set(skew.database_s)
        if skew.wrong != self._was_wrong:
            self._write(skew)
            self._was_wrong = skew.wrong

    def _write(self, skew: ClockSkew) -> None:
        reason = f"{self._prefix}clocks do not agree with the ledger's time: {skew.sentence}" if skew.wrong else None
        _write_own_alarm(self._alarms, CLOCK_SKEW, reason, about=self._prefix)


class _Condition(NamedTuple):
    name: str
    reason: str | None


class SpoolAlarms:
    """The gauge tells them even if the database cannot be written to; there, each is raised as soon as it can be."""

    def __init__(self, root: Path, alarms: Alarms, metrics: Metrics) -> None:
        self._root = root
        self._alarms = alarms
        self._metrics = metrics
        self._raised: dict[str, str | None] = {}
        self._shown: set[str] = set()

    def update(self, spool: SpoolStatus) -> None:
        """Raise and clear what the spool's state asks for."""
        for condition in self._conditions(spool):
            if self._raised.get(condition.name, "") != condition.reason:
                self._write(condition)

    def show(self, spool: SpoolStatus) -> None:
        """Bring the gauge up to date, whatever the database holds."""
        for condition in self._conditions(spool):
            if condition.reason is not None or condition.name in self._shown:
                self._shown.add(condition.name)
                self._metrics.alarm.labels(condition.name).set(condition.reason is not None)

    def _conditions(self, spool: SpoolStatus) -> Iterator[_Condition]:
        yield _Condition(REFUSES, spool.refused and f"{self._root}: {spool.refused}")
        bytes_ = spool.quarantined_bytes
        held = f"{self._root}: {bytes_} bytes of records that the database refused: `tuneloop spool list`"
        yield _Condition(QUARANTINED, held if bytes_ else None)

    def _write(self, condition: _Condition) -> None:
        try:
            _write_own_alarm(self._alarms, condition.name, condition.reason, about=f"{self._root}: ")
            self._raised[condition.name] = condition.reason
        except LedgerError as error:  # the next turn tries again
            log.warning("alarm_not_stored", name=condition.name, reason=str(error))
