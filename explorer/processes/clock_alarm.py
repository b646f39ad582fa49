"""Raises the alarm about clocks that do not agree with the ledger's time."""

import socket
import time
from collections.abc import Callable

from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.own_alarms import write_own_alarm
from tuneloop.shared.ledger.storage.transactions import Transactions
from tuneloop.shared.ledger.versions.alarms import Alarms
from tuneloop.shared.operations.clock_skew import CLOCK_SKEW, ClockSkew


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
        write_own_alarm(self._alarms, CLOCK_SKEW, reason, about=self._prefix)
