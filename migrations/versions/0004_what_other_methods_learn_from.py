"""Say which replies are not samples of the policy, since other methods than policy gradients learn from them; alarms.

The column is added in place, at the end: nothing is copied, whatever the ledger holds. What was dropped stays dropped.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Apply the step."""
    op.add_column("experiences", sa.Column("unsampled", sa.Text, nullable=True))
    some, columns = sa.text("unsampled IS NOT NULL"), ["state", "sampled_at"]
    op.create_index("ix_experiences_unsampled", "experiences", columns, sqlite_where=some, postgresql_where=some)
    _alarms()


def downgrade() -> None:
    """Take the step back. Alarms are lost. What is no sample of the policy is dropped, but for what is trained on."""
    op.drop_table("alarms")
    op.execute(
        "UPDATE experiences SET state = 'dropped', reason = unsampled, lease_epoch = NULL, lease_until = NULL "
        "WHERE unsampled IS NOT NULL AND state IN ('recorded', 'rewarded', 'committed', 'leased')"
    )
    op.drop_index("ix_experiences_unsampled", "experiences")
    op.drop_column("experiences", "unsampled")


def _alarms() -> None:
    op.create_table(
        "alarms",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("holds", sa.Boolean, nullable=False),
        sa.Column("raised_at", sa.Double, nullable=False),
        sa.Column("cleared_at", sa.Double, nullable=True),
        sa.Column("step", sa.Integer, nullable=True),
        sa.Column("version", sa.Integer, nullable=True),
        sa.Column("value", sa.Double, nullable=True),
        sa.Column("threshold", sa.Double, nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alarms")),
        *(sa.CheckConstraint(rule, name=op.f(f"ck_alarms_{name}")) for name, rule in _RULES.items()),
    )
    raised = sa.text("state = 'raised'")
    op.create_index("ix_alarms_one_open", "alarms", ["name"], unique=True, sqlite_where=raised, postgresql_where=raised)


_RULES = {
    "state": "state IN ('raised', 'cleared')",
    "name": "length(name) BETWEEN 1 AND 64",
    "cleared_at": "(state = 'cleared') = (cleared_at IS NOT NULL)",
    "value_is_finite": "value IS NULL OR (value > -1e300 AND value < 1e300)",
    "threshold_is_finite": "threshold IS NULL OR (threshold > -1e300 AND threshold < 1e300)",
}
