"""Hold canaries, versions that were rolled back or pinned, why each changed its state, and how each was evaluated.

SQLite cannot change a CHECK, so there the table of versions is made anew, and its rows carried over.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_OLD_COLUMNS = "version step epoch path manifest_sha256 consumed purged created_at served_at"


def upgrade() -> None:
    """Apply the step."""
    _change_versions(_NEW_RULES, pinned=True)
    op.add_column("exchanges", sa.Column("engine", sa.SmallInteger, nullable=True))
    _version_events()
    _evaluations()
    _mismatches()


def downgrade() -> None:
    """Take the step back. Events, evaluations and pins are lost; a canary is a candidate, one rolled back rejected."""
    op.drop_table("mismatches")
    op.drop_table("evaluations")
    op.drop_table("version_events")
    op.drop_column("exchanges", "engine")
    _change_versions(_OLD_RULES, pinned=False)


def _change_versions(rules: dict[str, str], *, pinned: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":
        _alter(rules, pinned=pinned)
    else:
        _make_anew(rules, pinned=pinned)


def _alter(rules: dict[str, str], *, pinned: bool) -> None:
    if pinned:
        op.add_column("versions", sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()))
    else:
        for name in ("ix_versions_one_pinned", "ix_versions_one_canary"):
            op.drop_index(name, "versions")
        op.drop_column("versions", "pinned")
    for name in ("state", "rejected_with_reason"):
        op.drop_constraint(op.f(f"ck_versions_{name}"), "versions", type_="check")
    if not pinned:
        op.execute(f"UPDATE versions SET state = {_OLD_STATE}")
    for name in ("state", "rejected_with_reason"):
        op.create_check_constraint(op.f(f"ck_versions_{name}"), "versions", rules[name])
    if pinned:
        _new_indexes()


def _make_anew(rules: dict[str, str], *, pinned: bool) -> None:
    # The experiences refer to their version: it is there again before this transaction ends.
    op.execute("PRAGMA defer_foreign_keys = ON")
    op.execute("CREATE TABLE aside_versions AS SELECT * FROM versions")
    op.drop_table("versions")
    columns: list[sa.Column[Any]] = [
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
    ]
    if pinned:
        columns.append(sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "versions",
        *columns,
        sa.PrimaryKeyConstraint("version", name=op.f("pk_versions")),
        sa.ForeignKeyConstraint(["epoch"], ["epochs.epoch"], name=op.f("fk_versions_epoch")),
        *(sa.CheckConstraint(rule, name=op.f(f"ck_versions_{name}")) for name, rule in rules.items()),
    )
    state = "state" if pinned else _OLD_STATE
    names = ", ".join(_OLD_COLUMNS.split())
    op.execute(
        f"INSERT INTO versions ({names}, state, reason) SELECT {names}, {state}, reason FROM aside_versions "
        "ORDER BY version"
    )
    op.drop_table("aside_versions")
    _only_one("champion", "state")
    if pinned:
        _new_indexes()


def _new_indexes() -> None:
    _only_one("canary", "state")
    some = sa.text("pinned")
    op.create_index(
        "ix_versions_one_pinned", "versions", ["pinned"], unique=True, sqlite_where=some, postgresql_where=some
    )


def _only_one(state: str, column: str) -> None:
    some = sa.text(f"state = '{state}'")
    name = f"ix_versions_one_{state}"
    op.create_index(name, "versions", [column], unique=True, sqlite_where=some, postgresql_where=some)


def _version_events() -> None:
    op.create_table(
        "version_events",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("details", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_version_events")),
        sa.ForeignKeyConstraint(["version"], ["versions.version"], name=op.f("fk_version_events_version")),
        sa.CheckConstraint(_ACTIONS, name=op.f("ck_version_events_action")),
    )
    op.create_index("ix_version_events_version_id", "version_events", ["version", "id"])


def _evaluations() -> None:
    op.create_table(
        "evaluations",
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("evaluator", sa.String(16), nullable=False),
        sa.Column("metric", sa.String(64), nullable=False),
        sa.Column("slice", sa.String(64), nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("deviation", sa.Double, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("evaluated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("version", "evaluator", "metric", "slice", name=op.f("pk_evaluations")),
        sa.ForeignKeyConstraint(["version"], ["versions.version"], name=op.f("fk_evaluations_version")),
        sa.CheckConstraint("evaluator IN ('engine', 'trainer')", name=op.f("ck_evaluations_evaluator")),
        sa.CheckConstraint("samples >= 1 AND deviation >= 0", name=op.f("ck_evaluations_samples")),
        sa.CheckConstraint("value > -1e300 AND value < 1e300", name=op.f("ck_evaluations_value_is_finite")),
    )


def _mismatches() -> None:
    op.create_table(
        "mismatches",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("engine", sa.SmallInteger, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_mismatches")),
        sa.UniqueConstraint("engine", "since", "until", name=op.f("uq_mismatches_engine_since_until")),
        sa.CheckConstraint("since <= until", name=op.f("ck_mismatches_range")),
    )


_ACTIONS = (
    "action IN ('published', 'evaluated', 'canary', 'promoted', 'retired', 'rejected', 'rolled_back', 'pinned', "
    "'unpinned', 'mismatch')"
)

_OLD_STATE = "CASE state WHEN 'canary' THEN 'candidate' WHEN 'rolled_back' THEN 'rejected' ELSE state END"

_SAME_RULES = {
    "not_negative": "version >= 0 AND step >= 0 AND consumed >= 0",
    "purged_of_the_consumed": "purged >= 0 AND purged <= consumed",
    "trained_under_an_epoch": "(version = 0) = (epoch IS NULL)",
    "manifest": "(version = 0) = (manifest_sha256 IS NULL)",
    "champion_was_served": "state <> 'champion' OR served_at IS NOT NULL",
}
_OLD_RULES = {
    "state": "state IN ('candidate', 'champion', 'rejected', 'retired')",
    **_SAME_RULES,
    "rejected_with_reason": "(state = 'rejected') = (reason IS NOT NULL)",
}
_NEW_RULES = {
    "state": "state IN ('candidate', 'canary', 'champion', 'rejected', 'rolled_back', 'retired')",
    **_SAME_RULES,
    "rejected_with_reason": "(state IN ('rejected', 'rolled_back')) = (reason IS NOT NULL)",
}
