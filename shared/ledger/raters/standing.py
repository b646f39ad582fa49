"""Who gave feedback, and who of them is in quarantine; inside a transaction of the ledger."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from tuneloop.shared.ledger.raters.rater_tables import RaterState, raters
from tuneloop.shared.ledger.raters.voices import Rater
from tuneloop.shared.ledger.storage.transactions import is_among, portions

#: Those in quarantine among the raters with these `names`, of any tenant.
QUARANTINED = select(raters.c.tenant, raters.c.name).where(
    raters.c.state == RaterState.QUARANTINED, is_among(raters.c.name, "names")
)


def rater_of(event: Any) -> Rater:
    """Who gave a feedback event."""
    return event.tenant, event.source or ""


def without_quarantined(connection: Connection, events: Collection[Any]) -> list[Any]:
    """The events but those of raters in quarantine."""
    names = {name for _, name in map(rater_of, events)}
    quarantined = {tuple(row) for some in portions(names) for row in connection.execute(QUARANTINED, {"names": some})}
    return [event for event in events if rater_of(event) not in quarantined]
