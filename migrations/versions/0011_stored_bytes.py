"""Count what the rows of each key take. What was stored before counts for nobody."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_COUNTED = ("exchanges", "feedback")


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "stored_by_keys",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_stored_by_keys")),
        sa.CheckConstraint("bytes >= 0", name=op.f("ck_stored_by_keys_not_negative")),
    )
    for table in _COUNTED:
        op.add_column(table, sa.Column("key", sa.String(64), nullable=True))
        op.add_column(table, sa.Column("stored_bytes", sa.Integer, nullable=False, server_default="0"))
    # With its rule in one statement: SQLite adds no rule to a table that is there.
    rule = "CONSTRAINT ck_keys_stored CHECK (max_stored_bytes > 0)"
    op.execute(f"ALTER TABLE keys ADD COLUMN max_stored_bytes BIGINT {rule}")


def downgrade() -> None:
    """Take the step back. Keys have no such bound any more."""
    op.drop_column("keys", "max_stored_bytes")
    for table in _COUNTED:
        op.drop_column(table, "stored_bytes")
        op.drop_column(table, "key")
    op.drop_table("stored_by_keys")
