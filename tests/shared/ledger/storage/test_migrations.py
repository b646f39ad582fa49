"""The migrations make just the tables of `schema.py`: their DDL is compared, so that no rule is forgotten."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import CheckConstraint, Connection, Engine, MetaData, text

from tests.conftest import Place
from tuneloop import migrations
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
    """Everything that the database says of our tables."""
    with engine.connect() as connection:
        found = _postgres(connection) if engine.dialect.name == "postgresql" else _sqlite(connection)
    return {name: rule for name, rule in found.items() if "alembic_version" not in name}


def _sqlite(connection: Connection) -> dict[str, str]:
    rows = connection.execute(text("SELECT type || ' ' || name, tbl_name, sql FROM sqlite_master"))
    return {name: _unordered(rule or "") for name, table, rule in rows if table != "alembic_version"}


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
    return "\n".join([head, *sorted(" ".join(clause.split()) for clause in clauses), body[body.rindex(")") :]])


def _postgres(connection: Connection) -> dict[str, str]:
    schema = connection.execute(text("SELECT current_schema()")).scalar()
    rows = [(kind, *row) for kind, query in CATALOG.items() for row in connection.execute(text(query))]
    return {f"{kind} {name}": rule.replace(f"{schema}.", "") for kind, name, rule in rows}


@pytest.fixture
def migrated(place: Place) -> Iterator[Engine]:
    """A database that the migrations have made."""
    database.upgrade(place.url, schema=place.schema)
    engine = database.connect(place.url, schema=place.schema)
    yield engine
    engine.dispose()


def without_our_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        metadata.drop_all(connection)


def created(engine: Engine, tables: MetaData) -> dict[str, str]:
    """The DDL of these tables, made anew in the place of the migrations'."""
    without_our_tables(engine)
    with engine.begin() as connection:
        tables.create_all(connection)
    return ddl(engine)


def changed(name: str, change: Callable[[CheckConstraint], CheckConstraint | None]) -> MetaData:
    """The schema with one CHECK changed, or dropped."""
    copy = MetaData(naming_convention=metadata.naming_convention)
    for table in metadata.sorted_tables:
        table.to_metadata(copy)
    table = copy.tables["experiences"]
    [rule] = [each for each in table.constraints if each.name == f"ck_experiences_{name}"]
    assert isinstance(rule, CheckConstraint)
    table.constraints.remove(rule)
    if (other := change(rule)) is not None:
        table.append_constraint(other)
    return copy


def test_the_migrations_make_the_schema(migrated: Engine) -> None:
    assert ddl(migrated) == created(migrated, metadata)


def test_the_comparison_sees_every_table_rule_and_index(migrated: Engine) -> None:
    said = "\n".join(f"{name} {rule}" for name, rule in ddl(migrated).items())
    for table in metadata.sorted_tables:
        names = [str(each.name) for each in (*table.constraints, *table.indexes)]
        assert [name for name in (table.name, *table.columns.keys(), *names) if name not in said] == []


def test_the_comparison_sees_a_dropped_rule(migrated: Engine) -> None:
    assert ddl(migrated) != created(migrated, changed("ranges", lambda rule: None))


def test_the_comparison_sees_a_changed_rule(migrated: Engine) -> None:
    def looser(rule: CheckConstraint) -> CheckConstraint:
        return CheckConstraint(str(rule.sqltext).replace("choice >= 0", "choice >= -1"), name="ranges")

    before = ddl(migrated)
    after = created(migrated, changed("ranges", looser))
    assert before != after
    assert before.keys() == after.keys()


def test_going_back_leaves_nothing_behind(migrated: Engine) -> None:
    steps = sorted(Path(migrations.__path__[0], "versions").rglob("[0-9]*.py"), key=attrgetter("name"), reverse=True)
    with migrated.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        for step in steps:
            _loaded(step).downgrade()
    assert ddl(migrated) == {}


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"migration_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_migrations_are_numbered_one_after_the_other() -> None:
    steps = sorted(Path(migrations.__path__[0], "versions").rglob("[0-9]*.py"), key=attrgetter("name"))
    found = [(_loaded(step).revision, _loaded(step).down_revision) for step in steps]
    numbers = [f"{number:04d}" for number in range(1, len(steps) + 1)]
    assert found == list(zip(numbers, [None, *numbers[:-1]], strict=True))
    assert all(re.match(rf"{number}_[a-z_]+\.py$", step.name) for number, step in zip(numbers, steps, strict=True))
