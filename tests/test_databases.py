"""What tests get ready-made is as if it had just been made, whatever the test before did to it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, inspect, select

from tests.databases import Schemas, put_file
from tests.factories import exchange, rewarded, trained
from tests.factories import feedback as said
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import feedback, metadata

pytestmark = pytest.mark.postgres


@pytest.fixture
def own(postgres_url: str) -> Iterator[Schemas]:
    """Schemas that no other test has had."""
    found = Schemas(postgres_url)
    yield found
    found.close()


def shape(url: str, schema: str | None) -> dict[str, list[str]]:
    engine = database.connect(url, schema=schema)
    with engine.connect() as connection:
        seen = inspect(connection)
        found = {table: [str(column["name"]) for column in seen.get_columns(table)] for table in seen.get_table_names()}
    engine.dispose()
    return found


def rows(engine: Engine) -> int:
    with engine.connect() as connection:
        return sum(len(connection.execute(select(table)).all()) for table in metadata.sorted_tables)


def filled(engine: Engine) -> int:
    """The id that the first row of feedback got."""
    ledger = Ledger(engine)
    ledger.versions.ensure_base(Path("/base"))
    trained(ledger, 2)
    rewarded(ledger, 3)
    with engine.connect() as connection:
        first: int = connection.execute(select(feedback.c.id).order_by(feedback.c.id).limit(1)).scalar_one()
    return first


def test_a_schema_comes_back_empty_and_counts_from_the_first_again(own: Schemas, postgres_url: str) -> None:
    for name in ("once", "again"):
        engine = database.connect(postgres_url, schema=name)
        with own.lent(name):
            assert rows(engine) == 0
            assert filled(engine) == 1
            assert rows(engine) > 10
            engine.dispose()
    assert own.made == 1


def test_nobody_writes_into_it_when_his_test_is_over(own: Schemas, postgres_url: str) -> None:
    engine = database.connect(postgres_url, schema="over")
    ledger = Ledger(engine)
    with own.lent("over"):
        ledger.recording.record([exchange()])
    with pytest.raises(Exception, match="does not exist"):
        ledger.recording.record([exchange()])
    engine.dispose()


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE feedback",
        "CREATE TABLE other (id INTEGER)",
        "ALTER TABLE feedback ADD COLUMN more TEXT",
        "ALTER TABLE versions DROP CONSTRAINT ck_versions_state",
        "DROP INDEX ix_experiences_committed",
        "REVOKE ALL ON experiment FROM CURRENT_USER",
        "INSERT INTO experiment VALUES (1, 'a', 'b'); ANALYZE experiment",
        "DROP SCHEMA changed CASCADE",
    ],
)
def test_one_that_a_test_has_changed_is_not_lent_again(own: Schemas, postgres_url: str, change: str) -> None:
    for name in ("changed", "next"):
        with own.lent(name):
            assert shape(postgres_url, name) == {
                table.name: list(table.columns.keys()) for table in metadata.sorted_tables
            }
            if name == "changed":
                with psycopg.connect(postgres_url, options="-csearch_path=changed", autocommit=True) as connection:
                    connection.execute(change)
    assert own.made == 2


def test_what_the_migrations_made_is_lent_with_their_number(own: Schemas, postgres_url: str, tmp_path: Path) -> None:
    put_file(f"sqlite:///{tmp_path}/migrated.db", "migrated")
    for name in ("up", "up again"):
        with own.lent(name, "migrated"):
            database.upgrade(postgres_url, schema=name)
            of_postgres = shape(postgres_url, name)
    database.upgrade(f"sqlite:///{tmp_path}/migrated.db")
    assert of_postgres == shape(f"sqlite:///{tmp_path}/migrated.db", None)
    assert own.made == 1


def test_a_database_of_another_step_is_not_lent_again(own: Schemas, postgres_url: str) -> None:
    with own.lent("newer", "migrated"), psycopg.connect(postgres_url, options="-csearch_path=newer") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with own.lent("right", "migrated"):
        database.upgrade(postgres_url, schema="right")
    assert own.made == 2


def test_a_file_of_sqlite_is_a_copy_and_one_that_is_there_stays(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}/ledger.db" for name in ("one", "other")]
    for url in urls:
        put_file(url)
        engine = database.connect(url)
        assert rows(engine) == 0
        assert filled(engine) == 1
        engine.dispose()
    put_file(urls[0])
    engine = database.connect(urls[0])
    assert rows(engine) > 10
    engine.dispose()


@pytest.mark.parametrize("time", ["first", "again"])
def test_a_ledger_is_empty_each_time(ledger: Ledger, engine: Engine, time: str) -> None:
    assert rows(engine) == 0
    ledger.recording.record([exchange(msg_id="chatcmpl-same"), said(msg_id="chatcmpl-same")])
    assert ledger.reports.counts()[State.REWARDED] == 1
