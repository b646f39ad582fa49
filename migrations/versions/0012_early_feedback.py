"""Find feedback about single replies that are not there yet, for a commit."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_NAME, _EARLY = "ix_feedback_early", sa.text("outcome = 'pending' AND msg_id IS NOT NULL")


def upgrade() -> None:
    """Apply the step."""
    op.create_index(_NAME, "feedback", ["tenant"], postgresql_where=_EARLY, sqlite_where=_EARLY)


def downgrade() -> None:
    """Take the step back."""
    op.drop_index(_NAME, "feedback")
