"""The events of the versions: every decision is a row, with who made it and why."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, insert, select, true

from tuneloop.shared.experience import VersionAction
from tuneloop.shared.ledger.storage.schema import version_events
from tuneloop.shared.ledger.storage.transactions import LedgerPart

#: The figures that decided something, as they are kept in JSON.
Details = Mapping[str, Any]


class VersionEvent(NamedTuple):
    """A row of `version_events`: what happened to a version, by whom, why, and the figures that decided it."""

    id: int
    version: int
    at: float
    action: VersionAction
    actor: str
    reason: str | None
    details: dict[str, Any]


class Decision(NamedTuple):
    """Who decides something about a version, when, why, and by which figures."""

    by: str
    at: float
    reason: str = ""
    details: Details | None = None

    def because(self, reason: str) -> "Decision":
        """What follows from it for another version."""
        return self._replace(reason=reason, details=None)


class VersionEvents(LedgerPart):
    """What happened to the versions."""

    def note(
        self, version: int, action: VersionAction, *, by: str, reason: str = "", details: Details | None = None
    ) -> None:
        """Record an event of a version that did not change its state."""
        with self._write() as connection:
            note(connection, version, action, Decision(by, self._clock(), reason, details))

    def events(self, version: int | None = None, *, last: int | None = None) -> list[VersionEvent]:
        """What happened to the versions, or to one, oldest first; only the `last` so many."""
        of_it = true() if version is None else version_events.c.version == version
        rows = self._read(select(version_events).where(of_it).order_by(version_events.c.id.desc()).limit(last))
        return [_event_of(row) for row in reversed(rows)]

    def last_event(self, actions: Sequence[VersionAction]) -> int:
        """The number of the newest event of these actions; 0 if there is none."""
        newest = select(func.max(version_events.c.id)).where(version_events.c.action.in_(actions))
        return int(self._read(newest)[0][0] or 0)

    def events_since(self, number: int, actions: Sequence[VersionAction]) -> list[VersionEvent]:
        """The events of these actions after the one of that number, oldest first.

        Decisions are made one at a time, so that none with a smaller number is committed later.
        """
        newer = (version_events.c.id > number, version_events.c.action.in_(actions))
        return [
            _event_of(row) for row in self._read(select(version_events).where(*newer).order_by(version_events.c.id))
        ]


def _event_of(row: Any) -> VersionEvent:
    return VersionEvent(
        id=row.id,
        version=row.version,
        at=row.at,
        action=VersionAction(row.action),
        actor=row.actor,
        reason=row.reason,
        details=json.loads(row.details) if row.details else {},
    )


def note(connection: Connection, version: int, action: VersionAction, decision: Decision) -> None:
    """Record an event of a version, in the transaction that changes it."""
    row = {
        "version": version,
        "at": decision.at,
        "action": action,
        "actor": decision.by,
        "reason": decision.reason or None,
        "details": json.dumps(decision.details, allow_nan=False) if decision.details else None,
    }
    connection.execute(insert(version_events).values(row))
