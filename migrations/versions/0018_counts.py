"""Have the database keep the counts of experiences."""

from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, PrimaryKeyConstraint, String

from tuneloop.shared.ledger.storage.counters import keep_counts

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "experience_counts",
        Column("id", BigInteger().with_variant(Integer(), "sqlite"), nullable=False),
        Column("tenant", String(64), nullable=False),
        Column("version", Integer, nullable=False),
        Column("state", String(16), nullable=False),
        Column("corrects", Boolean, nullable=False),
        Column("rows", BigInteger, nullable=False),
        Column("rewarded", BigInteger, nullable=False),
        Column("reward_sum", Double, nullable=False),
        PrimaryKeyConstraint("id", name="pk_experience_counts"),
    )
    columns = ["tenant", "version", "state", "corrects"]
    op.create_index(f"ix_experience_counts_{'_'.join(columns)}", "experience_counts", columns)
    keep_counts(op.get_bind())
