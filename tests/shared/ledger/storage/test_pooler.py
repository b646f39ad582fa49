"""PostgreSQL as platforms run it: behind PgBouncer, whose sessions are others' too, and with several schemas."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from structlog.testing import capture_logs

from tests.doubles.pgbouncer import pooled
from tests.factories import exchange, feedback
from tuneloop.shared.errors import DatabaseAway
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.database_url import parse_url

pytestmark = pytest.mark.postgres


@pytest.fixture(params=["session", "transaction"])
def pooled_url(postgres_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    admin = create_engine(parse_url(postgres_url), isolation_level="AUTOCOMMIT")
    with pooled(postgres_url, request.param) as url:
        yield url
    with admin.connect() as connection:
        for schema in ("pool_one", "pool_two"):
            connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))
    admin.dispose()


def test_experiments_behind_a_pooler_are_upgraded_and_written_to_at_once_each_in_its_schema(
    postgres_url: str, pooled_url: str
) -> None:
    schemas = ("pool_one", "pool_two")
    for schema in schemas * 2:
        database.upgrade(pooled_url, schema=schema)

    def use(number: int) -> int:
        """Record, rate, commit and lease, with connections that go back to the pooler in between."""
        schema = schemas[number % 2]
        ledger = Ledger(database.connect(pooled_url, schema=schema))
        for _ in range(10):
            said = [exchange() for _ in range(8)]
            ledger.recording.record([*said, *(feedback(msg_id=each.msg_id) for each in said)])
            ledger.recording.commit("acme")
            ledger.transactions.engine.dispose()
        ledger.close()
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [0, 1, 2, 3]
    direct = create_engine(parse_url(postgres_url))
    with direct.connect() as connection:
        stray = connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")).scalars().all()
        rows = [connection.scalar(text(f"SELECT count(*) FROM {schema}.experiences")) for schema in schemas]
        locks = connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
    direct.dispose()
    assert (stray, rows, locks) == ([], [160, 160], 0)
    for schema in schemas:
        ledger = Ledger(database.connect(pooled_url, schema=schema))
        assert ledger.reports.counts()[State.COMMITTED] == 160
        assert len(ledger.training.lease(ledger.training.take_epoch("trainer"), 160, BatchRules())) == 160
        assert ledger.reports.audit() == []
        ledger.close()


def test_an_upgrade_that_waits_for_another_says_so_and_ends(
    postgres_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_S", 0.2)
    other = create_engine(parse_url(postgres_place.url))
    with other.begin() as connection, capture_logs() as logs:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": database._LOCK_KEY})
        with pytest.raises(DatabaseAway, match=r"another process .* 0.2 s: try again"):
            database.upgrade(postgres_place.url, schema=postgres_place.schema)
    other.dispose()
    assert [each["event"] for each in logs] == ["waits_for_another_upgrade"]
    database.upgrade(postgres_place.url, schema=postgres_place.schema)


def test_connections_say_whose_they_are(postgres_place: Any) -> None:
    for more, name in ("", f"tuneloop {postgres_place.schema}"), ("&application_name=mine", "mine"):
        engine = database.connect(postgres_place.url + more, schema=postgres_place.schema)
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW application_name")) == name
        engine.dispose()
