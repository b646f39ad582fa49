"""Note what was taken of the outbox, what of it was refused, and when feedback was said again."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, LargeBinary, PrimaryKeyConstraint, Text

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Apply the step."""
    op.add_column("feedback", Column("repeated_at", Double, nullable=True))
    op.create_table(
        "outbox_files",
        Column("file", Text, nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("seen_at", Double, nullable=False),
        Column("removed_at", Double, nullable=True),
        PrimaryKeyConstraint("file", name="pk_outbox_files"),
    )
    op.create_table(
        "refused_records",
        Column("file", Text, nullable=False),
        Column("end_offset", BigInteger, nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("reason", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("refused_at", Double, nullable=False),
        PrimaryKeyConstraint("file", "end_offset", name="pk_refused_records"),
    )
