"""Alarms of which each machine has its own, of clock and spool: their reasons begin with what they are about."""

import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.ledger.storage.ledger_clock import CLOCK_SKEW, ClockSkew
from tuneloop.shared.ledger.storage.transactions import Transactions
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.spool_format import SpoolStatus

log = structlog.get_logger()

REFUSES, QUARANTINED = "database_refuses", "records_quarantined"


class _Condition(NamedTuple):
    """Why an alarm is wanted; None: it is not."""

    name: str
    reason: str | None


def _write_own_alarm(alarms: Alarms, about: str, condition: _Condition, opened: Collection[Alarm]) -> None:
    """Keep the alarm of a condition. Raises LedgerError."""
    if alarms.keep_own(condition.name, condition.reason, about=about, opened=opened):
        log.error("alarm_raised", name=condition.name, reason=f"{about}{condition.reason}")


class ClockAlarm:
    """Compares this machine's clock `wall`, and the database's, with the ledger's time."""

    def __init__(
        self, transactions: Transactions, alarms: Alarms, metrics: Metrics, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._transactions = transactions
        self._alarms = alarms
        self._metrics = metrics
        self._wall = wall
        self._about = f"{socket.gethostname()}: "

    def update(self, opened: Collection[Alarm]) -> None:
        """Show the differences, and raise or clear the alarm, of those that are open. Raises LedgerError."""
        self._transactions.keep_time()
        skew = ClockSkew(self._wall() - self._transactions.time(), self._transactions.clock_skew())
        self._metrics.clock_skew.labels("machine").set(skew.machine_s)
        self._metrics.clock_skew.labels("database").set(skew.database_s)
        reason = f"clocks do not agree with the ledger's time: {skew.sentence}" if skew.wrong else None
        _write_own_alarm(self._alarms, self._about, _Condition(CLOCK_SKEW, reason), opened)


class SpoolAlarms:
    """The gauge tells them even if the database cannot be written to; there, each is raised as soon as it can be."""

    def __init__(self, root: Path, alarms: Alarms, metrics: Metrics) -> None:
        self._about = f"{socket.gethostname()}: {root}: "
        self._alarms = alarms
        self._metrics = metrics
        self._shown: set[str] = set()

    def update(self, spool: SpoolStatus, opened: Collection[Alarm]) -> None:
        """Raise and clear, of those that are open, what the spool's state asks for."""
        for condition in _conditions(spool):
            try:
                _write_own_alarm(self._alarms, self._about, condition, opened)
            except LedgerError as error:  # the next turn tries again
                log.warning("alarm_not_stored", name=condition.name, reason=str(error))

    def show(self, spool: SpoolStatus) -> None:
        """Bring the gauge up to date, whatever the database holds."""
        for condition in _conditions(spool):
            if condition.reason is not None or condition.name in self._shown:
                self._shown.add(condition.name)
                self._metrics.alarm.labels(condition.name).set(condition.reason is not None)


def _conditions(spool: SpoolStatus) -> Iterator[_Condition]:
    yield _Condition(REFUSES, spool.refused)
    bytes_ = spool.quarantined_bytes
    held = f"{bytes_} bytes of records that the database refused: `tuneloop spool list`"
    yield _Condition(QUARANTINED, held if bytes_ else None)
