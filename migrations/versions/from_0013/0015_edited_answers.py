"""Rows that were edited and not rated: they have no reward, and how alike the reply and the edited answer are.

SQLite cannot change a CHECK. These become looser, so only the words of the table are written anew, and no row is.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_AFTER = {
    "rewarded_first": "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR rewarded_at IS NOT NULL",
    "rewarded_at": "(reward IS NULL AND edit_similarity IS NULL) = (rewarded_at IS NULL)",
    "reward_by_a_rule": "(rewarded_at IS NULL) = (reward_rule IS NULL)",
    "recorded_without_reward": "state <> 'recorded' OR rewarded_at IS NULL",
}
_BEFORE = {
    "rewarded_first": "state NOT IN ('rewarded', 'committed', 'leased', 'trained') OR reward IS NOT NULL",
    "rewarded_at": "(reward IS NULL) = (rewarded_at IS NULL)",
    "reward_by_a_rule": "(reward IS NULL) = (reward_rule IS NULL)",
    "recorded_without_reward": "state <> 'recorded' OR reward IS NULL",
}
_NEW = "edit_similarity", "edit_similarity IS NULL OR edit_similarity BETWEEN 0 AND 1"

_BY_VERSION, _CORRECTIONS = "ix_experiences_version_min_sampled_at_reward", "ix_experiences_corrections"
_CORRECTS = sa.text("correction > 0")
_EDITED = sa.text("reward IS NULL AND edit_similarity IS NOT NULL")


def upgrade() -> None:
    """Apply the step."""
    op.add_column("experiences", sa.Column("edit_similarity", sa.Double, nullable=True))
    _change_rules(_BEFORE, {**_AFTER, _NEW[0]: _NEW[1]})
    _index(_BY_VERSION, "edit_similarity")
    op.create_index("ix_experiences_edited", "experiences", ["state"], sqlite_where=_EDITED, postgresql_where=_EDITED)


def downgrade() -> None:
    """Take the step back. What was edited and not rated has the likeness for its reward."""
    op.drop_index("ix_experiences_edited", "experiences")
    op.execute("UPDATE experiences SET reward = edit_similarity WHERE reward IS NULL")
    _index(f"{_BY_VERSION}_edit_similarity")
    _change_rules({**_AFTER, _NEW[0]: _NEW[1]}, _BEFORE)
    op.drop_column("experiences", "edit_similarity")


def _index(old: str, *more: str) -> None:
    """Let what rewards are counted by hold all that they are made of."""
    op.drop_index(old, "experiences")
    op.drop_index(_CORRECTIONS, "experiences")
    op.create_index("_".join([_BY_VERSION, *more]), "experiences", ["version_min", "sampled_at", "reward", *more])
    columns = ["version_min", "reward", *more]
    op.create_index(_CORRECTIONS, "experiences", columns, sqlite_where=_CORRECTS, postgresql_where=_CORRECTS)


def _change_rules(before: dict[str, str], after: dict[str, str]) -> None:
    if op.get_bind().dialect.name != "postgresql":
        _write_anew(_clauses(before), _clauses(after))
        return
    for name in before:
        op.drop_constraint(op.f(f"ck_experiences_{name}"), "experiences", type_="check")
    for name, rule in after.items():
        op.create_check_constraint(op.f(f"ck_experiences_{name}"), "experiences", rule)


def _clauses(rules: dict[str, str]) -> list[str]:
    return [f"CONSTRAINT ck_experiences_{name} CHECK ({rule})" for name, rule in rules.items()]


def _write_anew(before: list[str], after: list[str]) -> None:
    connection = op.get_bind()
    table = "type = 'table' AND name = 'experiences'"
    words = connection.execute(sa.text(f"SELECT sql FROM sqlite_master WHERE {table}")).scalar_one()
    for clause in before[1:]:
        words = _replaced(words, f", {clause}", "")
    words = _replaced(words, before[0], ", ".join(after))
    schema = connection.execute(sa.text("PRAGMA schema_version")).scalar_one()
    op.execute("PRAGMA writable_schema = ON")
    connection.execute(sa.text(f"UPDATE sqlite_master SET sql = :words WHERE {table}"), {"words": words})
    op.execute(f"PRAGMA schema_version = {schema + 1}")
    op.execute("PRAGMA writable_schema = RESET")


def _replaced(words: str, old: str, new: str) -> str:
    """The table's words with a clause in the place of another, however blanks stand between clauses."""
    head, found, rest = words.partition(old)
    if not found and old.startswith(", "):
        head, found, rest = words.partition(f", \n\t{old.removeprefix(', ')}")
    if not found:
        raise ValueError(f"the table experiences has not the rule {old}")
    return head + new + rest
