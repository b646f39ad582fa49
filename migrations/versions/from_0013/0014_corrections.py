"""Find the rows that correct replies which were trained on, so that they can be told from replies."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_NAME = "ix_experiences_corrections"
_CORRECTS = sa.text("correction > 0")


def upgrade() -> None:
    """Apply the step."""
    columns = ["version_min", "reward"]
    op.create_index(_NAME, "experiences", columns, postgresql_where=_CORRECTS, sqlite_where=_CORRECTS)


def downgrade() -> None:
    """Take the step back."""
    op.drop_index(_NAME, "experiences")
