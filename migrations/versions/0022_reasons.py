"""Index why experiences were set aside, so that the reasons are counted without the rows."""

from alembic import op
from sqlalchemy import text

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Apply the step."""
    which = text("reason IS NOT NULL")
    op.create_index(
        "ix_experiences_aside", "experiences", ["state", "reason"], sqlite_where=which, postgresql_where=which
    )
