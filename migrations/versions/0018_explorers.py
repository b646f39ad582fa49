"""List the explorers, and keep with them what several of them count together."""

from alembic import op
from sqlalchemy import Column, Double, Integer, PrimaryKeyConstraint, String, Text

revision = "0018"
down_revision = "0017"

_COUNTED = ("asked", "failed", "copies", "broken", "refused")
_SUMMED = ("seconds", "tokens", "seconds_squared", "tokens_squared", "seconds_by_tokens")


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
        PrimaryKeyConstraint("name", name="pk_explorers"),
    )
    op.create_table(
        "leads",
        Column("what", String(32), nullable=False),
        Column("holder", Text, nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("until", Double, nullable=False),
        PrimaryKeyConstraint("what", name="pk_leads"),
    )
    op.create_table(
        "trial_counts",
        Column("began", Double, nullable=False),
        Column("version", Integer, nullable=False),
        Column("explorer", Text, nullable=False),
        *(Column(name, Integer, nullable=False) for name in _COUNTED),
        *(Column(name, Double, nullable=False) for name in _SUMMED),
        PrimaryKeyConstraint("began", "version", "explorer", name="pk_trial_counts"),
    )
    op.create_table(
        "token_uses",
        Column("nonce", String(64), nullable=False),
        Column("key_id", String(64), nullable=False),
        Column("events", Integer, nullable=False),
        Column("expires_at", Double, nullable=False),
        PrimaryKeyConstraint("nonce", name="pk_token_uses"),
    )
    op.create_index("ix_token_uses_expires_at", "token_uses", ["expires_at"])
    op.create_index("ix_token_uses_key_id", "token_uses", ["key_id"])
