"""Hold the grammars that replies were held to, so that these can be trained on as samples of the policy under them.

The column is added in place, at the end: nothing is copied, whatever the ledger holds.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Apply the step."""
    op.add_column("experiences", sa.Column("grammar", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    """Take the step back. Without its grammar a reply is no sample of the policy; what is leased is dropped for it."""
    op.execute(
        "UPDATE experiences SET state = 'dropped', reason = 'sampling:grammar', lease_epoch = NULL, lease_until = NULL "
        "WHERE grammar IS NOT NULL AND state = 'leased'"
    )
    op.execute("UPDATE experiences SET unsampled = 'sampling:grammar' WHERE grammar IS NOT NULL AND unsampled IS NULL")
    op.drop_column("experiences", "grammar")
