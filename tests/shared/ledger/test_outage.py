"""A database that goes away, fills up or turns read-only."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tests.doubles import postgres
from tests.factories import exchange, feedback, leased, published, rewarded
from tuneloop.shared.errors import LedgerForbidden, LedgerUnavailable
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database


@pytest.fixture
def own_server() -> Iterator[postgres.PostgresServer]:
    server = postgres.started()
    yield server
    server.close()


@pytest.mark.postgres
def test_a_server_that_stops_and_comes_back_costs_nothing(own_server: postgres.PostgresServer) -> None:
    database.upgrade(own_server.url)
    ledger = Ledger(database.connect(own_server.url))
    said = rewarded(ledger)
    own_server.stop()
    for verb in (
        lambda: ledger.recording.commit("acme"),
        lambda: ledger.recording.record(said),
        ledger.reports.counts,
        ledger.versions.champion,
    ):
        with pytest.raises(LedgerUnavailable):
            verb()
    own_server.start()
    assert ledger.reports.counts()[State.REWARDED] == 1
    assert ledger.recording.commit("acme") == 1
    ledger.close()


@pytest.mark.postgres
def test_a_server_that_stops_within_a_verb_leaves_nothing_behind(own_server: postgres.PostgresServer) -> None:
    database.upgrade(own_server.url)
    ledger = Ledger(database.connect(own_server.url))
    epoch, samples = leased(ledger, 2)

    def publish(version: int) -> tuple[Path, str]:
        own_server.stop()
        return published(version)

    with pytest.raises(LedgerUnavailable):
        ledger.training.register(epoch, [sample.id for sample in samples], step=1, publish=publish)
    own_server.start()
    assert ledger.versions.all() == []
    assert ledger.reports.counts()[State.LEASED] == 2
    ledger.close()


@pytest.mark.postgres
def test_a_server_that_is_not_there_is_unavailable() -> None:
    ledger = Ledger(database.connect("postgresql://tuneloop:secret@127.0.0.1:9/tuneloop"))
    with pytest.raises(LedgerUnavailable) as caught:
        ledger.recording.record([exchange()])
    assert "secret" not in str(caught.value)
    ledger.close()


@pytest.mark.postgres
def test_a_server_that_only_reads_is_unavailable(postgres_place: Place) -> None:
    """As a standby is after a failover, until the connections find the new primary."""
    engine = database.connect(postgres_place.url, schema=postgres_place.schema)
    with engine.begin() as connection:
        connection.execute(CreateSchema(str(postgres_place.schema)))
    database.upgrade(postgres_place.url, schema=postgres_place.schema)
    with engine.connect() as connection:
        connection.execute(text("SET default_transaction_read_only = on"))
        connection.commit()
    ledger = Ledger(engine)
    with pytest.raises(LedgerUnavailable, match="read-only"):
        ledger.recording.record([exchange()])
    ledger.close()


def test_a_file_that_another_program_has_locked_is_unavailable(sqlite_place: Place) -> None:
    database.upgrade(sqlite_place.url)
    engine = database.connect(sqlite_place.url)
    ledger = Ledger(engine)
    other = sqlite3.connect(str(engine.url.database), isolation_level=None)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        ledger.recording.record([exchange()])
    assert sum(ledger.reports.counts().values()) == 0
    other.execute("ROLLBACK")
    other.close()
    ledger.recording.record([exchange()])
    assert ledger.reports.counts()[State.RECORDED] == 1
    ledger.close()


def test_a_folder_that_is_not_there_is_unavailable() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/gone/ledger.db"
    ledger = Ledger(database.connect(url))
    with pytest.raises(LedgerUnavailable, match="unable to open"):
        ledger.reports.counts()
    ledger.close()


def test_a_full_disk_is_unavailable_and_stores_nothing(sqlite_place: Place) -> None:
    database.upgrade(sqlite_place.url)
    engine = database.connect(sqlite_place.url)
    ledger = Ledger(engine)
    with engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    said = [exchange(request=os.urandom(100_000)) for _ in range(3)]
    with pytest.raises(LedgerUnavailable, match="full"):
        ledger.recording.record([*said, feedback(msg_id=said[0].msg_id)])
    assert sum(ledger.reports.counts().values()) == 0
    ledger.close()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_was_deleted_or_replaced_is_written_to_no_more(sqlite_place: Place, replaced: bool) -> None:
    database.upgrade(sqlite_place.url)
    ledger = Ledger(database.connect(sqlite_place.url))
    ledger.recording.record([exchange()])
    path = Path(sqlite_place.url.removeprefix("sqlite:///"))
    elsewhere = path.rename(path.with_suffix(".elsewhere"))
    if replaced:
        shutil.copy(elsewhere, path)
    for verb in (lambda: ledger.recording.record([exchange()]), ledger.reports.counts):
        with pytest.raises(LedgerForbidden, match="was deleted or replaced"):
            verb()
    with pytest.raises(LedgerForbidden), ledger.transactions.write():
        pass
    elsewhere.replace(path)
    ledger.recording.record([exchange()])
    assert sum(ledger.reports.counts().values()) == 2
    ledger.close()
