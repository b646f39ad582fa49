"""The tables of raters: how far each can be relied on, and who put whom into quarantine."""

from enum import StrEnum

from sqlalchemy import Boolean, CheckConstraint, Column, Double, Index, Integer, PrimaryKeyConstraint, String, Table

from tuneloop.shared.ledger.storage.schema_types import RowId, Words, metadata, one_of


class RaterState(StrEnum):
    """Whether a rater's feedback counts."""

    ACTIVE = "active"  # -> quarantined
    QUARANTINED = "quarantined"  # -> active


#: Who gave feedback: `name` is its `source`, empty for feedback that names none. `released`: somebody has looked, and
#: the rater is put into quarantine by hand only. Not `settled`: what the rater had a part in is to be rewarded anew.
raters = Table(
    "raters",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("name", Words, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reliability", Double, nullable=False),
    Column("compared", Integer, nullable=False),
    Column("events", Integer, nullable=False),
    Column("extreme", Integer, nullable=False),
    Column("released", Boolean, nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("reason", Words, nullable=True),
    Column("updated_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name"),
    CheckConstraint(one_of("state", RaterState), name="state"),
    CheckConstraint("(state = 'quarantined') = (reason IS NOT NULL)", name="quarantined_with_reason"),
    CheckConstraint("reliability >= 0 AND reliability <= 1", name="reliability"),
    CheckConstraint("compared >= 0 AND extreme >= 0 AND events >= extreme", name="not_negative"),
)

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
