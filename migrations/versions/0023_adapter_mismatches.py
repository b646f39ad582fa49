"""Note which version a mismatch is of, where it is of one adapter beside others."""

from alembic import op
from sqlalchemy import Column, Integer

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    """Apply the step."""
    op.add_column("mismatches", Column("version", Integer, nullable=True))
