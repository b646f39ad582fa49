"""How much each rater counts now, as rewards need it; inside a transaction of the ledger."""

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, select

from tuneloop.shared.ledger.raters.rater_tables import RaterState, raters
from tuneloop.shared.ledger.raters.reliability import LEAST_WEIGHT, Rater, weight_of
from tuneloop.shared.ledger.storage.transactions import is_among, portions

_NAMED = select(raters).where(is_among(raters.c.name, "names"))

#: Those in quarantine among the raters with these `names`, of any tenant.
QUARANTINED = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.QUARANTINED, is_among(raters.c.name, "names")
)


class Standing:
    """The weights of some raters: 0 in quarantine."""

    def __init__(self, connection: Connection, events: Iterable[Any]) -> None:
        self._names: set[str] = set()
        self._weights: dict[Rater, float] = {}
        self.read(connection, events)

    def read(self, connection: Connection, events: Iterable[Any]) -> None:
        """Read what is not known yet of the raters of more events."""
        names = {name for _, name in map(rater_of, events)} - self._names
        self._names |= names
        for portion in portions(names):
            for row in connection.execute(_NAMED, {"names": portion}):
                known = weight_of(row.reliability, row.compared)
                self._weights[row.tenant, row.name] = 0.0 if row.state == RaterState.QUARANTINED else known

    def weight(self, event: Any) -> float:
        """How much the rater of an event counts."""
        return self._weights.get(rater_of(event), LEAST_WEIGHT)

    def without_quarantined(self, events: Iterable[Any]) -> list[Any]:
        """The events but those of raters in quarantine."""
        return [event for event in events if self.weight(event)]


def rater_of(event: Any) -> Rater:
    """Who gave a feedback event."""
    return event.tenant, event.source or ""


def without_quarantined(connection: Connection, events: Collection[Any]) -> list[Any]:
    """The events but those of raters in quarantine."""
    return Standing(connection, events).without_quarantined(events) if events else []
