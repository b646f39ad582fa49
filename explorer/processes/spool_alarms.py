"""Raises alarms about this machine's spool: what the database refuses, and what was given up."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import structlog

from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.processes.own_alarms import write_own_alarm
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.ledger.versions.alarms import Alarms
from tuneloop.shared.spool_format import SpoolStatus

log = structlog.get_logger()

REFUSES, QUARANTINED = "database_refuses", "records_quarantined"


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
            write_own_alarm(self._alarms, condition.name, condition.reason, about=f"{self._root}: ")
            self._raised[condition.name] = condition.reason
        except LedgerError as error:  # the next turn tries again
            log.warning("alarm_not_stored", name=condition.name, reason=str(error))
