"""Hold feedback of every kind, corrections, groups and priorities, reward rules, users, erasures and exports.

The tables are made anew, and their rows carried over: SQLite cannot change a CHECK, and a table that was altered would
not read like one that was created.
"""

import importlib

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

#: What 0001 did: the last number is the reward. In the form in which rules are stored: sorted keys, no blanks.
RULE = (
    '{"attribution_window":null,"boolean_values":[0.0,1.0],"clip":null,"default":null,"label_values":{},'
    '"weights":{"reward":1.0}}'
)

# Tables whose rows refer to others come after those.
TABLES = ("epochs", "versions", "exchanges", "experiences", "feedback")

# The columns that are the same on both sides.
OF_A_VERSION = "version state step epoch path manifest_sha256 created_at served_at reason"
OF_AN_EXCHANGE = "msg_id tenant endpoint request received_at latency_s"
OF_AN_EXPERIENCE = (
    "id msg_id choice state reason reward version_min version_max temperature finish_reason text completion_tokens "
    "blob rewarded_at committed_at lease_epoch lease_until trained_version"
)
OF_FEEDBACK = "id event_id msg_id choice tenant task_id run_id received_at"


def upgrade() -> None:
    """Apply the step."""
    _put_aside(TABLES)
    for make in (_epochs, _versions, _reward_rules, _exchanges, _experiences, _feedback, _erasures, _exports):
        make()
    _fill_the_new_tables()
    _finish(TABLES)


def downgrade() -> None:
    """Take the step back. Columns and tables that 0001 does not have are lost, and rows that it cannot hold."""
    tables = ("experiment", *TABLES)
    _put_aside(tables)
    for table in ("reward_rules", "erasures", "exports"):
        op.drop_table(table)
    importlib.import_module("tuneloop.migrations.versions.0001_first").upgrade()
    _fill_the_old_tables()
    _finish(tables)


def _execute(statement: str, **values: str) -> None:
    op.get_bind().execute(sa.text(statement), values)


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _put_aside(tables: tuple[str, ...]) -> None:
    """Move the rows of the tables into plain copies, and drop the tables.

    The copies are not temporary tables: those need a right of their own on PostgreSQL, and a folder with room for all
    rows on SQLite.
    """
    if _is_postgresql():  # else what another program writes between a copy and the drop would be lost
        _execute(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")
    for table in tables:
        _execute(f"CREATE TABLE aside_{table} AS SELECT * FROM {table}")
    for table in reversed(tables):
        op.drop_table(table)


def _finish(tables: tuple[str, ...]) -> None:
    """Drop the copies, and let PostgreSQL go on numbering after the greatest id; SQLite does so by itself."""
    for table in tables:
        op.drop_table(f"aside_{table}")
    if _is_postgresql():
        for table in ("experiences", "feedback"):
            numbers = f"pg_get_serial_sequence('{table}', 'id')"
            _execute(f"SELECT setval({numbers}, coalesce(max(id), 0) + 1, false) FROM {table}")


def _carry(table: str, same: str, also: str = "", **changed: str) -> None:
    """Fill the table from its copy, `aside`: the columns that stay the `same`, those that are `changed`, no others."""
    values = {name: f"aside.{name}" for name in same.split()} | changed
    into, what = ", ".join(values), ", ".join(values.values())
    _execute(f"INSERT INTO {table} ({into}) SELECT {what} FROM aside_{table} AS aside {also}")


def _fill_the_new_tables() -> None:
    _carry("epochs", "epoch trainer started_at", seen_at="aside.started_at")
    _carry("versions", f"{OF_A_VERSION} consumed", purged="0")
    _execute(
        "INSERT INTO reward_rules (definition, created_at) SELECT :rule, since "
        "FROM (SELECT min(rewarded_at) AS since FROM aside_experiences) AS rewards WHERE since IS NOT NULL",
        rule=RULE,
    )
    _carry("exchanges", OF_AN_EXCHANGE)
    _carry(
        "experiences",
        OF_AN_EXPERIENCE,
        "JOIN aside_exchanges AS said ON said.msg_id = aside.msg_id",
        correction="0",
        tenant="said.tenant",
        task_id="said.task_id",
        run_id="said.run_id",
        priority="0",
        reward_rule="CASE WHEN aside.reward IS NOT NULL THEN (SELECT id FROM reward_rules) END",
        sampled_at="said.received_at",
    )
    recorded = "EXISTS (SELECT 1 FROM experiences WHERE experiences.msg_id = aside.msg_id)"
    _carry(
        "feedback",
        OF_FEEDBACK,
        call_id="aside.event_id",
        kind="'number'",
        metric="'reward'",
        value="aside.reward",
        outcome=f"CASE WHEN {recorded} THEN 'accepted' ELSE 'pending' END",
    )


def _fill_the_old_tables() -> None:
    """Carry back what 0001 can hold.

    A correction is the second row of one reply, and 0001 has one: it is left out, not folded into the first, which says
    truly what was trained on, and with which reward. Its feedback stays. A version's `consumed` counts the trained
    rows that are there, since 0001 takes any difference for a fault of the ledger.
    """
    _carry("experiment", "id project name")
    _carry("epochs", "epoch trainer started_at")
    _carry(
        "versions",
        OF_A_VERSION,
        "LEFT JOIN (SELECT trained_version, count(*) AS replies FROM aside_experiences WHERE correction = 0 "
        "GROUP BY trained_version) AS trained ON trained.trained_version = aside.version",
        consumed="coalesce(trained.replies, 0)",
    )
    # The choices of one reply belong to one task and run, so any of its rows tells them.
    _carry(
        "exchanges",
        OF_AN_EXCHANGE,
        "LEFT JOIN (SELECT msg_id, min(id) AS id FROM aside_experiences GROUP BY msg_id) AS one "
        "ON one.msg_id = aside.msg_id LEFT JOIN aside_experiences AS reply ON reply.id = one.id",
        task_id="reply.task_id",
        run_id="reply.run_id",
    )
    _carry("experiences", OF_AN_EXPERIENCE, "WHERE correction = 0", recorded_at="aside.sampled_at")
    _carry_back_the_feedback()


def _carry_back_the_feedback() -> None:
    """0001 takes every feedback for a reward: left out is what is no number about a reply, or was taken back there."""
    taken_back = (
        "SELECT DISTINCT said.id FROM aside_feedback AS said JOIN aside_feedback AS back ON back.msg_id = said.msg_id "
        "WHERE back.kind = 'retraction' AND back.tenant = said.tenant AND back.metric = said.metric "
        "AND (back.source = said.source OR (back.source IS NULL AND said.source IS NULL)) "
        "AND (back.choice IS NULL OR back.choice = said.choice) "
        "AND (back.received_at, back.id) > (said.received_at, said.id)"
    )
    _carry(
        "feedback",
        OF_FEEDBACK,
        f"LEFT JOIN ({taken_back}) AS taken_back ON taken_back.id = aside.id "
        "WHERE aside.kind IN ('number', 'boolean') AND aside.msg_id IS NOT NULL AND taken_back.id IS NULL",
        reward="aside.value",
    )


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(name))


def _index_some(name: str, table: str, columns: list[str | sa.TextClause], where: str, *, unique: bool = False) -> None:
    some = sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=some, postgresql_where=some)


def _epochs() -> None:
    op.create_table(
        "epochs",
        sa.Column("epoch", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("trainer", sa.String(255), nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
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
        sa.Column("purged", sa.Integer, nullable=False, server_default="0"),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("served_at", sa.Double, nullable=True),
        sa.Column("reason", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_versions")),
        _check("ck_versions_state", "state IN ('candidate', 'champion', 'rejected', 'retired')"),
        _check("ck_versions_not_negative", "version >= 0 AND step >= 0 AND consumed >= 0"),
        _check("ck_versions_purged_of_the_consumed", "purged >= 0 AND purged <= consumed"),
        _check("ck_versions_trained_under_an_epoch", "(version = 0) = (epoch IS NULL)"),
        _check("ck_versions_manifest", "(version = 0) = (manifest_sha256 IS NULL)"),
        _check("ck_versions_rejected_with_reason", "(state = 'rejected') = (reason IS NOT NULL)"),
        _check("ck_versions_champion_was_served", "state <> 'champion' OR served_at IS NOT NULL"),
        sa.ForeignKeyConstraint(["epoch"], ["epochs.epoch"], name=op.f("fk_versions_epoch")),
    )
    _index_some("ix_versions_one_champion", "versions", ["state"], "state = 'champion'", unique=True)


def _reward_rules() -> None:
    op.create_table(
        "reward_rules",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reward_rules")),
        sa.UniqueConstraint("definition", name=op.f("uq_reward_rules_definition")),
    )


def _exchanges() -> None:
    op.create_table(
        "exchanges",
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("user_id", sa.Text, nullable=True),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("latency_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("msg_id", name=op.f("pk_exchanges")),
    )
    _index_some("ix_exchanges_user_id", "exchanges", ["tenant", "user_id"], "user_id IS NOT NULL")


def _experiences() -> None:
    op.create_table(
        "experiences",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("msg_id", sa.String(96), nullable=False),
        sa.Column("choice", sa.SmallInteger, nullable=False),
        sa.Column("correction", sa.SmallInteger, nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("run_id", sa.Text, nullable=True),
        sa.Column("priority", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("reward", sa.Double, nullable=True),
        sa.Column("reward_rule", sa.Integer, nullable=True),
        sa.Column("version_min", sa.Integer, nullable=False),
        sa.Column("version_max", sa.Integer, nullable=False),
        sa.Column("temperature", sa.Double, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("tool_calls", sa.LargeBinary, nullable=True),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
        sa.Column("sampled_at", sa.Double, nullable=False),
        sa.Column("rewarded_at", sa.Double, nullable=True),
        sa.Column("committed_at", sa.Double, nullable=True),
        sa.Column("group_id", sa.BigInteger, nullable=True),
        sa.Column("lease_epoch", sa.Integer, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=True),
        sa.Column("trained_version", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiences")),
        sa.UniqueConstraint("msg_id", "choice", "correction", name=op.f("uq_experiences_msg_id_choice_correction")),
        *_experience_rules(),
        sa.ForeignKeyConstraint(["msg_id"], ["exchanges.msg_id"], name=op.f("fk_experiences_msg_id")),
        sa.ForeignKeyConstraint(["reward_rule"], ["reward_rules.id"], name=op.f("fk_experiences_reward_rule")),
        sa.ForeignKeyConstraint(["lease_epoch"], ["epochs.epoch"], name=op.f("fk_experiences_lease_epoch")),
        sa.ForeignKeyConstraint(["trained_version"], ["versions.version"], name=op.f("fk_experiences_trained_version")),
    )
    _index_the_experiences()


def _experience_rules() -> list[sa.CheckConstraint]:
    rules = {
        "state": "state IN ('recorded', 'rewarded', 'committed', 'leased', 'trained', 'expired', 'dropped')",
        "aside_with_reason": "(state IN ('expired', 'dropped')) = (reason IS NOT NULL)",
        "rewarded_first": "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL",
        "reward_is_finite": "reward IS NULL OR (reward > -1e300 AND reward < 1e300)",
        "rewarded_at": "(reward IS NULL) = (rewarded_at IS NULL)",
        "reward_by_a_rule": "(reward IS NULL) = (reward_rule IS NULL)",
        "committed_first": "state NOT IN ('committed', 'leased', 'trained') OR committed_at IS NOT NULL",
        "leased_under_an_epoch": "(state = 'leased') = (lease_epoch IS NOT NULL)",
        "leased_until": "(state = 'leased') = (lease_until IS NOT NULL)",
        "trained_in_a_version": "(state = 'trained') = (trained_version IS NOT NULL)",
        "ranges": "version_min <= version_max AND choice >= 0 AND completion_tokens >= 0",
        "correction_and_priority": "correction >= 0 AND priority > -1e300 AND priority < 1e300",
        "recorded_without_reward": "state <> 'recorded' OR reward IS NULL",
        "committed_once_committed": "state NOT IN ('recorded', 'rewarded') OR committed_at IS NULL",
        "grouped_once_committed": "group_id IS NULL OR committed_at IS NOT NULL",
    }
    return [_check(f"ck_experiences_{name}", rule) for name, rule in rules.items()]


def _index_the_experiences() -> None:
    op.create_index("ix_experiences_state_sampled_at", "experiences", ["state", "sampled_at"])
    op.create_index("ix_experiences_version_min_reward", "experiences", ["version_min", "reward"])
    committed = "state = 'committed'"
    some: dict[str, tuple[list[str | sa.TextClause], str]] = {
        "trajectory": (["tenant", "task_id", "run_id"], "task_id IS NOT NULL"),
        "trained_version": (["trained_version"], "trained_version IS NOT NULL"),
        "leased": (["lease_epoch"], "state = 'leased'"),
        "committed": (["tenant", "id"], committed),
        "committed_by_priority": (["tenant", sa.text("priority DESC"), "id"], committed),
        "committed_by_version": (["version_min"], committed),
        "committed_by_age": (["sampled_at"], committed),
        "grouped": (["tenant", "group_id", "id"], f"{committed} AND group_id IS NOT NULL"),
        "ungrouped": (["id"], f"{committed} AND group_id IS NULL"),
    }
    for name, (columns, where) in some.items():
        _index_some(f"ix_experiences_{name}", "experiences", columns, where)


def _feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("call_id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("msg_id", sa.String(96), nullable=True),
        sa.Column("choice", sa.SmallInteger, nullable=True),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("run_id", sa.Text, nullable=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("metric", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=True),
        sa.Column("text", sa.Text, nullable=True),
        sa.Column("other_msg_id", sa.String(96), nullable=True),
        sa.Column("other_choice", sa.SmallInteger, nullable=True),
        sa.Column("source", sa.Text, nullable=True),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("occurred_at", sa.Double, nullable=True),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback")),
        *_feedback_rules(),
        sa.UniqueConstraint("event_id", name=op.f("uq_feedback_event_id")),
    )
    op.create_index("ix_feedback_msg_id_received_at", "feedback", ["msg_id", "received_at"])
    _index_some("ix_feedback_other_msg_id", "feedback", ["other_msg_id"], "other_msg_id IS NOT NULL")
    _index_some("ix_feedback_trajectory", "feedback", ["tenant", "task_id", "run_id"], "msg_id IS NULL")
    _index_some("ix_feedback_pending", "feedback", ["id"], "outcome = 'pending'")
    _index_some("ix_feedback_source", "feedback", ["tenant", "source"], "source IS NOT NULL")


def _feedback_rules() -> list[sa.CheckConstraint]:
    rules = {
        "kind": "kind IN ('number', 'boolean', 'label', 'comment', 'demonstration', 'preference', 'retraction')",
        "outcome": "outcome IN ('accepted', 'duplicate', 'unknown', 'late', 'pending')",
        "value_is_finite": "value IS NULL OR (value > -1e300 AND value < 1e300)",
        "value_of_a_number": "(kind IN ('number', 'boolean')) = (value IS NOT NULL)",
        "text_of_words": "(kind IN ('label', 'comment', 'demonstration')) = (text IS NOT NULL)",
        "preferred_to_another": "(kind = 'preference') = (other_msg_id IS NOT NULL)",
        "about_something": "msg_id IS NOT NULL OR (task_id IS NOT NULL AND run_id IS NOT NULL)",
    }
    return [_check(f"ck_feedback_{name}", rule) for name, rule in rules.items()]


def _erasures() -> None:
    op.create_table(
        "erasures",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("user_id", sa.Text, nullable=False),
        sa.Column("erased_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_erasures")),
        sa.UniqueConstraint("tenant", "user_id", name=op.f("uq_erasures_tenant_user_id")),
    )


def _exports() -> None:
    op.create_table(
        "exports",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
        sa.UniqueConstraint("path", name=op.f("uq_exports_path")),
    )
