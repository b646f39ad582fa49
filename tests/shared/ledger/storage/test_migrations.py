"""The migrations make just the tables of `schema.py`: their DDL is compared, so that no rule is forgotten."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, text
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tests.factories import exchange, feedback
from tuneloop.migrations.older import _add_edit_similarity
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.keys import KeyLimits
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import metadata

CATALOG = {
    "column": """
        SELECT table_name || '.' || column_name, concat_ws(' ', ordinal_position, data_type, character_maximum_length,
               is_nullable, column_default)
        FROM information_schema.columns WHERE table_schema = current_schema()""",
    "constraint": """
        SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND contype <> 'n'""",
    "index": "SELECT tablename || '.' || indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()",
}


def ddl(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        found = _postgres(connection) if engine.dialect.name == "postgresql" else _sqlite(connection)
    return {name: rule for name, rule in found.items() if "alembic_version" not in name}


def _sqlite(connection: Connection) -> dict[str, str]:
    rows = connection.execute(text("SELECT type || ' ' || name, tbl_name, sql FROM sqlite_master"))
    return {name: _unordered((rule or "").replace('"', "")) for name, table, rule in rows if table != "alembic_version"}


def _unordered(rule: str) -> str:
    """The clauses of a table, sorted: SQLite writes a column that was added behind the rules of the table."""
    if not rule.startswith("CREATE TABLE"):
        return rule
    head, _, body = rule.partition("(")
    clauses, depth = [""], 1
    for sign in body[: body.rindex(")")]:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "," and depth == 1:
            clauses.append("")
        else:
            clauses[-1] += sign
    tail = body[body.rindex(")") :]
    return "\n".join([head, *sorted(" ".join(each.split()) for each in clauses), " ".join(tail.split())])


def _postgres(connection: Connection) -> dict[str, str]:
    schema = connection.execute(text("SELECT current_schema()")).scalar()
    rows = [(kind, *row) for kind, query in CATALOG.items() for row in connection.execute(text(query))]
    return {f"{kind} {name}": rule.replace(f"{schema}.", "") for kind, name, rule in rows}


@pytest.fixture
def migrated(place: Place) -> Iterator[Engine]:
    database.upgrade(place.url, schema=place.schema)
    engine = database.connect(place.url, schema=place.schema)
    yield engine
    engine.dispose()


def without_our_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        metadata.drop_all(connection)


def created(engine: Engine, tables: MetaData) -> dict[str, str]:
    without_our_tables(engine)
    with engine.begin() as connection:
        tables.create_all(connection)
    return ddl(engine)


def test_the_migrations_make_the_schema(migrated: Engine) -> None:
    assert ddl(migrated) == created(migrated, metadata)


def test_the_numbers_go_on_from_the_baseline() -> None:
    steps = [*ScriptDirectory.from_config(database.migrations()).walk_revisions()][::-1]
    assert [step.revision for step in steps] == [f"{number:04d}" for number in range(16, 16 + len(steps))]
    assert steps[0].down_revision is None


@contextmanager
def of_0014(place: Place) -> Iterator[Engine]:
    engine = database.connect(place.url, schema=place.schema)
    tables = Path(__file__).with_name("schema_0014.sql").read_text()
    baseline = ScriptDirectory.from_config(database.migrations()).get_revision("0016").module
    with engine.begin() as connection:
        if place.schema is not None:
            connection.execute(CreateSchema(place.schema))
        else:
            for name, ours in baseline._SQLITE.items():
                tables = tables.replace(name, ours)
        for statement in filter(str.strip, tables.split(";\n")):
            connection.exec_driver_sql(statement)
        for table, rows in ROWS.items():
            for row in rows:
                names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
                connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)
    yield engine
    engine.dispose()


COMMITTED: dict[str, Any] = {"reward": 1.0, "reward_rule": 1, "rewarded_at": 2.0, "committed_at": 3.0}
STATES: dict[str, dict[str, Any]] = {
    "recorded": {},
    "committed": COMMITTED,
    "leased": COMMITTED | {"lease_epoch": 1, "lease_until": 99.0},
    "trained": COMMITTED | {"trained_version": 1},
    "dropped": {"reason": "sampling:top_p", "unsampled": "sampling:top_p"},
}
#: All of a reply but its state.
_REPLY: dict[str, Any] = {"choice": 0, "correction": 0, "tenant": "acme", "priority": 0.0, "temperature": 1.0}
_REPLY |= {"version_min": 0, "version_max": 0, "text": "", "completion_tokens": 0, "blob": b"\0", "sampled_at": 1.0}
ROWS: dict[str, list[dict[str, Any]]] = {
    "epochs": [{"epoch": 1, "trainer": "t", "started_at": 1.0, "seen_at": 1.0}],
    "versions": [
        {"version": 0, "state": "champion", "step": 0, "epoch": None, "path": "/base", "manifest_sha256": None}
        | {"consumed": 0, "created_at": 1.0, "served_at": 1.0},
        {"version": 1, "state": "candidate", "step": 1, "epoch": 1, "path": "/p", "manifest_sha256": "5" * 64}
        | {"consumed": 1, "created_at": 1.0},
    ],
    "reward_rules": [{"definition": "{}", "created_at": 1.0}],
    "exchanges": [
        {"msg_id": state, "tenant": "acme", "endpoint": "/", "request": b"{}", "received_at": 1.0, "latency_s": 1.0}
        | {"key": "web", "stored_bytes": 5}
        for state in STATES
    ],
    "experiences": [{"msg_id": state, "state": state, **_REPLY, **row} for state, row in STATES.items()],
    "keys": [
        {"key_id": "key_1", "digest": b"1", "name": "web", "tenant": "acme", "scopes": "read", "created_at": 1.0}
        | {"bytes_per_minute": 5, "max_stored_bytes": 7, "max_concurrent": 3}
    ],
    "key_events": [{"key_id": "key_1", "at": 1.0, "action": "created", "actor": "a"}],
    "raters": [
        {"tenant": "acme", "name": "eve", "state": "quarantined", "reliability": 0.5, "compared": 1, "events": 2}
        | {"extreme": 1, "released": False, "settled": True, "reason": "noise", "updated_at": 1.0}
    ],
    "stored_by_keys": [{"tenant": "acme", "key": "web", "bytes": 25}],
}


def rows(engine: Engine, table: str) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {table}"))]


@pytest.mark.contract
@pytest.mark.parametrize("revision", ["0014", "0015"])
def test_an_older_database_gets_the_tables_of_a_new_one_and_keeps_its_rows(place: Place, revision: str) -> None:
    with of_0014(place) as engine:
        before = rows(engine, "experiences")
        if revision == "0015":
            with engine.begin() as connection:
                _add_edit_similarity(Operations(MigrationContext.configure(connection)))
                connection.execute(text("UPDATE alembic_version SET version_num = '0015'"))
        database.upgrade(place.url, schema=place.schema)
        assert rows(engine, "experiences") == [row | {"edit_similarity": None, "policy": 0} for row in before]
        assert rows(engine, "alembic_version") == [{"version_num": "0023"}]
        assert [row["name"] for row in rows(engine, "policies")] == ["default"]
        assert len(rows(engine, "exchanges")) == len(STATES)
        ledger = Ledger(engine)
        assert ledger.reports.audit() == []
        assert ledger.raters.all()[0][:3] == ("acme", "eve", "quarantined")
        [key] = ledger.keys.all()
        assert (key.name, key.limits) == ("web", KeyLimits(max_concurrent=3))
        said = exchange()
        ledger.recording.record([said, feedback(msg_id=said.msg_id)])
        assert ledger.reports.counts()[State.REWARDED] == 1
        assert _named(ddl(engine)) == _named(created(engine, metadata))


def _named(found: dict[str, str]) -> dict[str, str]:
    """Without the positions of columns: PostgreSQL never gives one again."""
    return {name: re.sub(r"^\d+ ", "", rule) for name, rule in found.items()}


@pytest.mark.contract
def test_a_database_of_an_earlier_release_is_refused_with_the_way_to_go(place: Place) -> None:
    with of_0014(place) as engine:
        with engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '0009'"))
        with pytest.raises(EnvironmentRefused, match=r"0009, older than 0014: upgrade it with the release .* before"):
            database.upgrade(place.url, schema=place.schema)
