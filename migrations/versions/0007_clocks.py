"""Hold what time the ledger has at each start of a machine, so that no process asks a clock that somebody sets."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "clocks",
        sa.Column("boot", sa.String(64), nullable=False),
        sa.Column("began_at", sa.Double, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.Column("skew", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("boot", name=op.f("pk_clocks")),
    )


def downgrade() -> None:
    """Take the step back. Processes go by their machines' clocks again."""
    op.drop_table("clocks")
