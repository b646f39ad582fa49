import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.conftest import Place
from tests.doubles.warm.process import WarmProcess
from tests.factories import exchange, rewarded
from tuneloop.shared.errors import EnvironmentRefused, SettingsError
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import metadata
from tuneloop.shared.settings.database_url import parse_url

UPGRADE = """import sys
from tuneloop.shared.ledger.storage.database import upgrade
upgrade(sys.argv[1], schema=sys.argv[2] or None)"""


def tables(place: Place) -> set[str]:
    engine = database.connect(place.url, schema=place.schema)
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    if place.schema is not None:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    with engine.connect() as connection:
        found = set(connection.execute(text(query)).scalars())
    engine.dispose()
    return found


ALL = {table.name for table in metadata.sorted_tables} | {"alembic_version"}


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:///relative.db", "sqlite"),
        ("sqlite:////folder/ledger.db", "sqlite"),
        ("sqlite+aiosqlite:////folder/ledger.db", "sqlite"),
        ("postgresql://host/db", "postgresql+psycopg"),
        ("postgres://host/db", "postgresql+psycopg"),
        ("postgresql+asyncpg://host/db", "postgresql+psycopg"),
        ("postgresql+psycopg2://host/db", "postgresql+psycopg"),
    ],
)
def test_every_usual_url_is_understood(url: str, driver: str) -> None:
    assert parse_url(url).drivername == driver


@pytest.mark.postgres
def test_a_pair_of_servers_is_asked_for_the_one_that_takes_writes(postgres_place: Place) -> None:
    there = parse_url(postgres_place.url)
    hosts = ["/nowhere", str(there.query["host"])]
    pair = there.update_query_dict({"host": hosts, "target_session_attrs": "read-write"}).render_as_string()
    database.upgrade(pair, schema=postgres_place.schema)
    engine = database.connect(pair, schema=postgres_place.schema)
    assert Ledger(engine).recording.record([exchange()])
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://host/db", "mysql is not supported; use sqlite or postgresql"),
        ("mysql+pymysql://u:secret@host/db", "mysql is not supported"),
        ("secret", "not a database URL; write sqlite:////folder/file.db or postgresql://"),
        ("", "not a database URL"),
        ("postgresql://u:secret@host:port/db", "not a database URL"),
        ("sqlite://", "name a file"),
        ("sqlite:///:memory:", "name a file"),
        ("sqlite:///file:ledger?mode=memory&uri=true", "name a file"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_cure(url: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"experience_buffer.path: {reason}") as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:secret@127.0.0.1:9/db", "postgresql://127.0.0.1:9/db?password=secret"])
def test_a_server_that_is_not_there_is_named_without_its_password(url: str) -> None:
    with pytest.raises(EnvironmentRefused, match=r"127.0.0.1:9/db.*refused.*start it, or correct the URL") as caught:
        database.upgrade(url)
    assert "secret" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentRefused, match=r"cannot make the file of sqlite:///.*file/ledger.db"):
        database.upgrade(f"sqlite:///{tmp_path}/file/ledger.db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_text("something else " * 100)
    with pytest.raises(EnvironmentRefused, match="file is not a database"):
        database.upgrade(f"sqlite:///{tmp_path}/ledger.db")


def test_upgrading_twice_is_upgrading_once(place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    engine = database.connect(place.url, schema=place.schema)
    rewarded(Ledger(engine))
    database.upgrade(place.url, schema=place.schema)
    assert tables(place) == ALL
    assert Ledger(engine).recording.commit("acme") == 1
    engine.dispose()


def test_four_processes_may_upgrade_at_once(place: Place) -> None:
    command = [sys.executable, "-c", UPGRADE, place.url, place.schema or ""]
    started = [WarmProcess(command) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    assert tables(place) == ALL


def test_an_upgrade_killed_at_any_moment_can_be_done_again(place: Place) -> None:
    command = [sys.executable, "-c", UPGRADE, place.url, place.schema or ""]
    for pause_s in (0.05, 0.1, 0.2):
        with WarmProcess(command) as process:
            time.sleep(pause_s)
            process.kill()
    database.upgrade(place.url, schema=place.schema)
    assert tables(place) == ALL


def test_a_database_of_a_newer_release_is_refused(place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    engine = database.connect(place.url, schema=place.schema)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(EnvironmentRefused, match=r"not of this release of tuneloop .*9999"):
        database.upgrade(place.url, schema=place.schema)


@pytest.mark.postgres
def test_two_schemas_of_one_database_know_nothing_of_each_other(postgres_url: str) -> None:
    ledgers = []
    for name in ("one", "two"):
        database.upgrade(postgres_url, schema=name)
        ledgers.append(Ledger(database.connect(postgres_url, schema=name)))
    ledgers[0].own("shop", "one")
    ledgers[1].own("shop", "two")
    ledgers[0].recording.record([exchange()])
    assert [sum(ledger.reports.counts().values()) for ledger in ledgers] == [1, 0]
    for ledger in ledgers:
        ledger.close()


def test_sqlite_is_set_to_lose_nothing_and_to_keep_its_references(sqlite_place: Place) -> None:
    database.upgrade(sqlite_place.url)
    engine = database.connect(sqlite_place.url)
    with engine.connect() as connection:
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert pragmas == ["wal", 2, 1]
    engine.dispose()
