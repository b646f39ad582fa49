"""List the explorers, keep what several of them count together, and know the experiment's folder."""

from alembic import op
from sqlalchemy import Column, Double, Integer, PrimaryKeyConstraint, String, Text

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Apply the step."""
    op.add_column("experiment", Column("folder", String(32), nullable=True))
    op.add_column("exchanges", Column("explorer", Text, nullable=True))
    op.add_column("mismatches", Column("explorer", Text, nullable=True))
    op.create_table(
        "explorers",
        Column("name", Text, nullable=False),
        Column("address", Text, nullable=False),
        Column("release", Text, nullable=False),
        Column("version", Integer, nullable=True),
        Column("seen_at", Double, nullable=False),
        Column("lead_epoch", Integer, nullable=True),
        Column("leads_until", Double, nullable=True),
        PrimaryKeyConstraint("name", name="pk_explorers"),
    )
    op.create_table(
        "shared_counts",
        Column("scope", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("amount", Double, nullable=False),
        Column("until", Double, nullable=False),
        PrimaryKeyConstraint("scope", "name", name="pk_shared_counts"),
    )
    op.create_index("ix_shared_counts_until", "shared_counts", ["until"])
