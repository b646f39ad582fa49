"""Let several policies be trained on one base, each with a line of versions of its own."""

from collections.abc import Sequence

from alembic import op
from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Double,
    Integer,
    PrimaryKeyConstraint,
    String,
    Text,
    TextClause,
    text,
)

revision = "0020"
down_revision = "0019"

_COMMITTED = "state = 'committed'"
#: The indexes that change: their table, their columns now, and what they are partial by.
_INDEXES: dict[str, tuple[str, list[str | TextClause], str, bool]] = {
    "ix_versions_one_champion": ("versions", ["policy", "state"], "state = 'champion'", True),
    "ix_versions_one_canary": ("versions", ["policy", "state"], "state = 'canary'", True),
    "ix_versions_one_pinned": ("versions", ["policy", "pinned"], "pinned", True),
    "ix_alarms_one_open": ("alarms", ["policy", "name"], "state = 'raised'", True),
    "ix_experiences_committed": ("experiences", ["policy", "tenant", "id"], _COMMITTED, False),
    "ix_experiences_committed_by_priority": (
        "experiences",
        ["policy", "tenant", text("priority DESC"), "id"],
        _COMMITTED,
        False,
    ),
    "ix_experiences_committed_by_version": ("experiences", ["policy", "version_min"], _COMMITTED, False),
    "ix_experiences_grouped": (
        "experiences",
        ["policy", "tenant", "group_id", "id"],
        f"{_COMMITTED} AND group_id IS NOT NULL",
        False,
    ),
    "ix_experiences_ungrouped": ("experiences", ["policy", "id"], f"{_COMMITTED} AND group_id IS NULL", False),
}
#: The rules of versions that change: before, and now.
_RULES = {
    "trained_under_an_epoch": ("(version = 0) = (epoch IS NULL)", "epoch IS NOT NULL OR (step = 0 AND consumed = 0)"),
    "manifest": ("(version = 0) = (manifest_sha256 IS NULL)", "(epoch IS NULL) = (manifest_sha256 IS NULL)"),
}


def upgrade() -> None:
    """Apply the step."""
    op.create_table(
        "policies",
        Column("id", Integer, nullable=False),
        Column("tenant", String(64), nullable=False),
        Column("name", String(64), nullable=False),
        Column("parent", Integer, nullable=False),
        Column("settings", Text, nullable=False),
        Column("state", String(16), nullable=False),
        Column("created_at", Double, nullable=False),
        Column("created_by", Text, nullable=False),
        CheckConstraint("state IN ('active', 'paused', 'deleted')", name="ck_policies_state"),
        CheckConstraint("length(name) BETWEEN 1 AND 64", name="ck_policies_name"),
        PrimaryKeyConstraint("id", name="pk_policies"),
    )
    _create_index("ix_policies_one_name", "policies", ["tenant", "name"], "state <> 'deleted'", unique=True)
    op.execute(
        "INSERT INTO policies SELECT 0, '', 'default', 0, '{}', 'active', created_at, ''"
        " FROM versions WHERE version = 0"
    )
    for table in ("versions", "experiences", "alarms"):
        op.add_column(table, Column("policy", Integer, nullable=False, server_default="0"))
    op.add_column("keys", Column("policy", Integer, nullable=True))
    for name, (table, columns, where, unique) in _INDEXES.items():
        op.drop_index(name, table)
        _create_index(name, table, columns, where, unique=unique)
    _create_index("ix_experiences_waiting", "experiences", ["policy", "committed_at"], _COMMITTED, unique=False)
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        _change_rules_of_sqlite(connection)
        return
    for name, (_, rule) in _RULES.items():
        op.drop_constraint(f"ck_versions_{name}", "versions")
        op.create_check_constraint(f"ck_versions_{name}", "versions", rule)


def _create_index(name: str, table: str, columns: Sequence[str | TextClause], where: str, *, unique: bool) -> None:
    op.create_index(name, table, columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


def _change_rules_of_sqlite(connection: Connection) -> None:
    """As SQLite describes it for rules that change no row: www.sqlite.org/lang_altertable.html#otheralter."""
    version = connection.exec_driver_sql("PRAGMA schema_version").scalar_one()
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    for before, now in _RULES.values():
        connection.exec_driver_sql(
            "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE type = 'table' AND name = 'versions'",
            (before, now),
        )
    connection.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    connection.exec_driver_sql("PRAGMA writable_schema = OFF")
