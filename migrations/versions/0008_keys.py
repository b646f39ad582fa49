"""Hold the keys that clients are let in by, and the log of what happened to them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_LIMITS = ("requests_per_minute", "tokens_per_minute", "feedback_per_minute", "bytes_per_minute", "max_concurrent")


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=True) for name in _LIMITS),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("revoked_at", sa.Double, nullable=True),
        sa.CheckConstraint(
            "length(name) BETWEEN 1 AND 64 AND length(tenant) BETWEEN 1 AND 64", name=op.f("ck_keys_names")
        ),
        sa.CheckConstraint("length(scopes) > 0", name=op.f("ck_keys_scopes")),
        sa.CheckConstraint(
            "requests_per_minute > 0 AND tokens_per_minute > 0 AND feedback_per_minute > 0"
            " AND bytes_per_minute > 0 AND max_concurrent > 0",
            name=op.f("ck_keys_limits"),
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_keys_digest")),
    )
    op.create_table(
        "key_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.CheckConstraint("action IN ('created', 'revoked')", name=op.f("ck_key_events_action")),
        sa.ForeignKeyConstraint(["key_id"], ["keys.key_id"], name=op.f("fk_key_events_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_key_events")),
    )
    op.create_index(op.f("ix_key_events_key_id_id"), "key_events", ["key_id", "id"])


def downgrade() -> None:
    """Take the step back. Whoever has a key is a stranger again."""
    op.drop_table("key_events")
    op.drop_table("keys")
