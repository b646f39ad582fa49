"""Let replies be listed from the newest to the oldest, all of them and those of a version."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Apply the step."""
    op.drop_index("ix_experiences_version_min_reward", "experiences")
    op.create_index(
        "ix_experiences_version_min_sampled_at_reward", "experiences", ["version_min", "sampled_at", "reward"]
    )
    op.create_index("ix_experiences_sampled_at", "experiences", ["sampled_at"])


def downgrade() -> None:
    """Take the step back."""
    op.drop_index("ix_experiences_sampled_at", "experiences")
    op.drop_index("ix_experiences_version_min_sampled_at_reward", "experiences")
    op.create_index("ix_experiences_version_min_reward", "experiences", ["version_min", "reward"])
