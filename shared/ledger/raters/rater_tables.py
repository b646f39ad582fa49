"""The tables of raters: who counts as one for the shares of a batch, and who put whom into quarantine."""

from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, CheckConstraint, Column, Double, Index, PrimaryKeyConstraint, String, Table

from tuneloop.shared.ledger.storage.schema_types import RowId, Words, metadata, one_of


class RaterState(StrEnum):
    """Whether a rater's feedback counts."""

    ACTIVE = "active"  # -> quarantined
    QUARANTINED = "quarantined"  # -> active


#: Who gave feedback: `name` is its `source`, empty for feedback that names none, or the voice behind several sources.
#: Not `settled`: what the rater had a part in is to be rewarded anew.
raters = Table(
    "raters",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("name", Words, nullable=False),
    Column("state", String(16), nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("reason", Words, nullable=True),
    Column("updated_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name"),
    CheckConstraint(one_of("state", RaterState), name="state"),
    CheckConstraint("(state = 'quarantined') = (reason IS NOT NULL)", name="quarantined_with_reason"),
)


def new_rater(tenant: str, name: str, now: float) -> dict[str, Any]:
    """A row of `raters` of somebody of whom nothing was decided."""
    row = {"tenant": tenant, "name": name, "state": RaterState.ACTIVE, "settled": True, "reason": None}
    return row | {"updated_at": now}


#: What was decided about each rater, by whom and why: append-only.
rater_events = Table(
    "rater_events",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("name", Words, nullable=False),
    Column("at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("actor", Words, nullable=False),
    Column("reason", Words, nullable=False),
    CheckConstraint(one_of("state", RaterState), name="state"),
    Index(None, "tenant", "name"),
)
