"""Hold how far each rater can be relied on, and who decided what about one."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_STATE = "state IN ('active', 'quarantined')"


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "raters",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reliability", sa.Double, nullable=False),
        sa.Column("compared", sa.Integer, nullable=False),
        sa.Column("events", sa.Integer, nullable=False),
        sa.Column("extreme", sa.Integer, nullable=False),
        sa.Column("released", sa.Boolean, nullable=False),
        sa.Column("settled", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name=op.f("pk_raters")),
        sa.CheckConstraint(_STATE, name=op.f("ck_raters_state")),
        sa.CheckConstraint(
            "(state = 'quarantined') = (reason IS NOT NULL)", name=op.f("ck_raters_quarantined_with_reason")
        ),
        sa.CheckConstraint("reliability >= 0 AND reliability <= 1", name=op.f("ck_raters_reliability")),
        sa.CheckConstraint("compared >= 0 AND extreme >= 0 AND events >= extreme", name=op.f("ck_raters_not_negative")),
    )
    op.create_table(
        "rater_events",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rater_events")),
        sa.CheckConstraint(_STATE, name=op.f("ck_rater_events_state")),
    )
    op.create_index(op.f("ix_rater_events_tenant_name"), "rater_events", ["tenant", "name"])


def downgrade() -> None:
    """Take the step back. Everybody's feedback counts alike again, and who was in quarantine is forgotten."""
    op.drop_table("rater_events")
    op.drop_table("raters")
