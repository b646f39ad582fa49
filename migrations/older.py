"""Stamps databases at 0014 and 0015 with the baseline and refuses older ones.

SQLite cannot change a CHECK. The new CHECKs are looser, so the table definition is rewritten and the rows stay.
"""

from collections.abc import Mapping

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Connection, Double, text

from tuneloop.shared.errors import EnvironmentRefused

BASELINE = "0016"

_EDITED = {
    "rewarded_first": (
        "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL",
        "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR rewarded_at IS NOT NULL",
    ),
    "rewarded_at": (
        "(reward IS NULL) = (rewarded_at IS NULL)",
        "(reward IS NULL AND edit_similarity IS NULL) = (rewarded_at IS NULL)",
    ),
    "reward_by_a_rule": ("(reward IS NULL) = (reward_rule IS NULL)", "(rewarded_at IS NULL) = (reward_rule IS NULL)"),
    "recorded_without_reward": (
        "state <> 'recorded' OR reward IS NULL",
        "state <> 'recorded' OR rewarded_at IS NULL",
    ),
    "edit_similarity": (None, "edit_similarity IS NULL OR edit_similarity BETWEEN 0 AND 1"),
}
_LIMITS = "requests_per_minute > 0 AND tokens_per_minute > 0 AND feedback_per_minute > 0{} AND max_concurrent > 0"
_KEYS = {"limits": (_LIMITS.format(" AND bytes_per_minute > 0"), _LIMITS.format(""))}
_RATERS = {
    "reliability": ("reliability >= 0 AND reliability <= 1", None),
    "not_negative": ("compared >= 0 AND extreme >= 0 AND events >= extreme", None),
}
_GONE = {
    "exchanges": ("stored_bytes",),
    "feedback": ("stored_bytes",),
    "keys": ("bytes_per_minute", "max_stored_bytes"),
    "raters": ("reliability", "compared", "events", "extreme", "released"),
}

#: The rules of a table by their names: each as it was and as it is, None where there is none.
_Rules = Mapping[str, tuple[str | None, str | None]]


def bring_to_baseline(connection: Connection) -> None:
    """Change a database of 0014 or 0015, and say so in it. Raises EnvironmentRefused for an older one."""
    context = MigrationContext.configure(connection)
    revision = context.get_current_revision()
    if revision is None or revision >= BASELINE:
        return
    if revision < "0014":
        raise EnvironmentRefused(
            f"the database has the schema {revision}, older than 0014: upgrade it with the release of tuneloop before"
            " this one first (tuneloop db upgrade)"
        )
    op = Operations(context)
    if revision == "0014":
        _add_edit_similarity(op)
    _change_rules(op, "keys", _KEYS)
    _change_rules(op, "raters", _RATERS)
    for table, columns in _GONE.items():
        for column in columns:
            op.drop_column(table, column)
    for table in ("stored_by_keys", "clocks"):
        op.drop_table(table)
    connection.execute(text("UPDATE alembic_version SET version_num = :baseline"), {"baseline": BASELINE})


def _add_edit_similarity(op: Operations) -> None:
    """Rows that were edited and not rated have no reward, and how alike the reply and the edited answer are."""
    op.add_column("experiences", Column("edit_similarity", Double, nullable=True))
    _change_rules(op, "experiences", _EDITED)
    op.drop_index("ix_experiences_version_min_sampled_at_reward", "experiences")
    op.drop_index("ix_experiences_corrections", "experiences")
    columns = ["version_min", "sampled_at", "reward", "edit_similarity"]
    op.create_index(f"ix_experiences_{'_'.join(columns)}", "experiences", columns)
    columns.remove("sampled_at")
    for name, of, where in (
        ("ix_experiences_corrections", columns, "correction > 0"),
        ("ix_experiences_edited", ["state"], "reward IS NULL AND edit_similarity IS NOT NULL"),
    ):
        op.create_index(name, "experiences", of, sqlite_where=text(where), postgresql_where=text(where))


def _change_rules(op: Operations, table: str, rules: _Rules) -> None:
    if op.get_bind().dialect.name == "sqlite":
        _change_words(op.get_bind(), table, rules)
        return
    for name, (before, after) in rules.items():
        if before is not None:
            op.drop_constraint(op.f(f"ck_{table}_{name}"), table, type_="check")
        if after is not None:
            op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, after)


def _change_words(connection: Connection, table: str, rules: _Rules) -> None:
    where = {"table": table}
    read = text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :table")
    words: str = connection.execute(read, where).scalar_one()
    for name, (before, after) in rules.items():
        clauses = (rule and f"CONSTRAINT ck_{table}_{name} CHECK ({rule})" for rule in (before, after))
        old, new = clauses
        if old is None:
            words = words[: words.rindex(")")] + f", {new}" + words[words.rindex(")") :]
            continue
        head, found, rest = words.partition(old)
        if not found:
            raise EnvironmentRefused(f"the table {table} of the database has not the rule {old}")
        words = head + new + rest if new is not None else head.rstrip().removesuffix(",") + rest
    schema = connection.execute(text("PRAGMA schema_version")).scalar_one()
    connection.execute(text("PRAGMA writable_schema = ON"))
    change = text("UPDATE sqlite_master SET sql = :words WHERE type = 'table' AND name = :table")
    connection.execute(change, where | {"words": words})
    connection.execute(text(f"PRAGMA schema_version = {schema + 1}"))
    connection.execute(text("PRAGMA writable_schema = RESET"))
