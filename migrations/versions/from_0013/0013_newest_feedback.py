"""Find the newest feedback, and the newest ratings, of a key, whatever others say meanwhile."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_NAMES = ("ix_feedback_tenant_key_id", "ix_feedback_rated")
_COLUMNS = ["tenant", "key", "id"]
_RATED = sa.text("kind IN ('number', 'boolean', 'label') AND msg_id IS NOT NULL")


def upgrade() -> None:
    """Apply the step."""
    op.create_index(_NAMES[0], "feedback", _COLUMNS)
    op.create_index(_NAMES[1], "feedback", _COLUMNS, postgresql_where=_RATED, sqlite_where=_RATED)


def downgrade() -> None:
    """Take the step back."""
    for name in reversed(_NAMES):
        op.drop_index(name, "feedback")
