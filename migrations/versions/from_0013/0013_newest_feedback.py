"""Find the newest feedback of a key, whatever others say meanwhile."""

from alembic import op

revision = "0013"
down_revision = "0012"

_NAME = "ix_feedback_tenant_key_id"


def upgrade() -> None:
    """Apply the step."""
    op.create_index(_NAME, "feedback", ["tenant", "key", "id"])


def downgrade() -> None:
    """Take the step back."""
    op.drop_index(_NAME, "feedback")
