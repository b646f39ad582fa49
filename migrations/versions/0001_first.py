"""Lay the tables: experiment, epochs, versions, exchanges, experiences, feedback."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Apply the step."""
    _experiment()
    _epochs()
    _versions()
    _exchanges()
    _experiences()
    _feedback()


def downgrade() -> None:
    """Take the step back."""
    for table in ("feedback", "experiences", "exchanges", "versions", "epochs", "experiment"):
        op.drop_table(table)


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(name))


def _experiment() -> None:
    op.create_table(
        "experiment",
        sa.Column("id", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment")),
        _check("ck_experiment_only_one", "id = 1"),
    )


def _epochs() -> None:
    op.create_table(
        "epochs",
        sa.Column("epoch", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("trainer", sa.String(255), nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_epochs")),
        _check("ck_epochs_from_one", "epoch >= 1"),
    )


def _versions() -> None:
    op.create_table(
        "versions",
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=True),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=True),
        sa.Column("consumed", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("served_at", sa.Double, nullable=True),
        sa.Column("reason", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_versions")),
        _check("ck_versions_state", "state IN ('candidate', 'champion', 'rejected', 'retired')"),
        _check("ck_versions_not_negative", "version >= 0 AND step >= 0 AND consumed >= 0"),
        _check("ck_versions_trained_under_an_epoch", "(version = 0) = (epoch IS NULL)"),
        _check("ck_versions_manifest", "(version = 0) = (manifest_sha256 IS NULL)"),
        _check("ck_versions_rejected_with_reason", "(state = 'rejected') = (reason IS NOT NULL)"),
        _check("ck_versions_champion_was_served", "state <> 'champion' OR served_at IS NOT NULL"),
        sa.ForeignKeyConstraint(["epoch"], ["epochs.epoch"], name=op.f("fk_versions_epoch")),
    )
    only_one = sa.text("state = 'champion'")
    op.create_index(
        "ix_versions_one_champion",
        "versions",
        ["state"],
        unique=True,
        sqlite_where=only_one,
        postgresql_where=only_one,
    )


def _exchanges() -> None:
    op.create_table(
        "exchanges",
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("run_id", sa.Text, nullable=True),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("latency_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("msg_id", name=op.f("pk_exchanges")),
    )


def _experiences() -> None:
    op.create_table(
        "experiences",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("choice", sa.SmallInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("reward", sa.Double, nullable=True),
        sa.Column("version_min", sa.Integer, nullable=False),
        sa.Column("version_max", sa.Integer, nullable=False),
        sa.Column("temperature", sa.Double, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
        sa.Column("recorded_at", sa.Double, nullable=False),
        sa.Column("rewarded_at", sa.Double, nullable=True),
        sa.Column("committed_at", sa.Double, nullable=True),
        sa.Column("lease_epoch", sa.Integer, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=True),
        sa.Column("trained_version", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiences")),
        sa.UniqueConstraint("msg_id", "choice", name=op.f("uq_experiences_msg_id_choice")),
        *_experience_rules(),
        sa.ForeignKeyConstraint(["msg_id"], ["exchanges.msg_id"], name=op.f("fk_experiences_msg_id")),
        sa.ForeignKeyConstraint(["lease_epoch"], ["epochs.epoch"], name=op.f("fk_experiences_lease_epoch")),
        sa.ForeignKeyConstraint(["trained_version"], ["versions.version"], name=op.f("fk_experiences_trained_version")),
    )
    op.create_index("ix_experiences_state_id", "experiences", ["state", "id"])
    op.create_index("ix_experiences_state_version_min", "experiences", ["state", "version_min"])
    op.create_index("ix_experiences_version_min_reward", "experiences", ["version_min", "reward"])
    op.create_index("ix_experiences_trained_version", "experiences", ["trained_version"])


def _experience_rules() -> list[sa.CheckConstraint]:
    rules = {
        "state": "state IN ('recorded', 'rewarded', 'committed', 'leased', 'trained', 'expired', 'dropped')",
        "aside_with_reason": "(state IN ('expired', 'dropped')) = (reason IS NOT NULL)",
        "rewarded_first": "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL",
        "reward_is_finite": "reward IS NULL OR (reward > -1e300 AND reward < 1e300)",
        "rewarded_at": "(reward IS NULL) = (rewarded_at IS NULL)",
        "committed_first": "state NOT IN ('committed', 'leased', 'trained') OR committed_at IS NOT NULL",
        "leased_under_an_epoch": "(state = 'leased') = (lease_epoch IS NOT NULL)",
        "leased_until": "(state = 'leased') = (lease_until IS NOT NULL)",
        "trained_in_a_version": "(state = 'trained') = (trained_version IS NOT NULL)",
        "ranges": "version_min <= version_max AND choice >= 0 AND completion_tokens >= 0",
        "recorded_without_reward": "state <> 'recorded' OR reward IS NULL",
        "committed_once_committed": "state NOT IN ('recorded', 'rewarded') OR committed_at IS NULL",
    }
    return [_check(f"ck_experiences_{name}", rule) for name, rule in rules.items()]


def _feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("choice", sa.SmallInteger, nullable=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("reward", sa.Double, nullable=False),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("run_id", sa.Text, nullable=True),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback")),
        _check("ck_feedback_reward_is_finite", "reward > -1e300 AND reward < 1e300"),
        sa.UniqueConstraint("event_id", name=op.f("uq_feedback_event_id")),
    )
    op.create_index("ix_feedback_msg_id_received_at", "feedback", ["msg_id", "received_at"])
