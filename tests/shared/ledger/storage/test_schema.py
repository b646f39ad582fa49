"""What the tables refuse, whoever asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from tests.conftest import Place, tables_at
from tests.factories import committed, exchange, experience, leased, rewarded, trained
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database

EXPERIENCES = [
    "state = 'lost'",
    "state = 'rewarded' WHERE state = 'recorded'",
    "state = 'committed', committed_at = 1 WHERE state = 'recorded'",
    "state = 'leased', lease_epoch = 1, lease_until = 1 WHERE state = 'recorded'",
    "state = 'trained', trained_version = 1 WHERE state = 'recorded'",
    "state = 'recorded' WHERE state = 'rewarded'",
    "state = 'committed' WHERE state = 'rewarded'",
    "state = 'leased' WHERE state = 'committed'",
    "state = 'leased', lease_epoch = 1 WHERE state = 'committed'",
    "state = 'leased', lease_until = 1 WHERE state = 'committed'",
    "state = 'leased', lease_epoch = 99, lease_until = 1 WHERE state = 'committed'",
    "state = 'trained' WHERE state = 'leased'",
    "state = 'trained', trained_version = 1 WHERE state = 'leased'",
    "state = 'trained', trained_version = 99, lease_epoch = NULL, lease_until = NULL WHERE state = 'leased'",
    "state = 'committed' WHERE state = 'leased'",
    "state = 'committed' WHERE state = 'trained'",
    "state = 'expired' WHERE state = 'recorded'",
    "state = 'dropped' WHERE state = 'recorded'",
    "state = 'recorded' WHERE state = 'dropped'",
    "reason = 'why' WHERE state = 'recorded'",
    "reward = NULL WHERE state = 'rewarded'",
    "reward = NULL, rewarded_at = NULL WHERE state = 'rewarded'",
    "rewarded_at = NULL WHERE state = 'committed'",
    "reward = 1 WHERE state = 'dropped'",
    "reward = 1, rewarded_at = 1 WHERE state = 'recorded'",
    "committed_at = NULL WHERE state = 'committed'",
    "committed_at = 1 WHERE state = 'rewarded'",
    "lease_epoch = NULL WHERE state = 'leased'",
    "lease_until = NULL WHERE state = 'leased'",
    "lease_until = 1 WHERE state = 'committed'",
    "trained_version = NULL WHERE state = 'trained'",
    "trained_version = 1 WHERE state = 'committed'",
    "version_min = 5",
    "choice = -1",
    "completion_tokens = -1",
    "msg_id = 'chatcmpl-unknown'",
    "msg_id = (SELECT min(msg_id) FROM exchanges), choice = 0",
]
VERSIONS = [
    "state = 'lost'",
    "state = 'champion', served_at = 1 WHERE version = 1",
    "state = 'champion', served_at = NULL WHERE version = 0",
    "state = 'rejected' WHERE version = 1",
    "reason = 'why' WHERE version = 1",
    "version = -1 WHERE version = 0",
    "consumed = -1",
    "step = -1",
    "epoch = NULL WHERE version = 1",
    "epoch = 99 WHERE version = 1",
    "epoch = 1 WHERE version = 0",
    "manifest_sha256 = NULL WHERE version = 1",
    "manifest_sha256 = 'x' WHERE version = 0",
]
OTHERS = [
    "UPDATE epochs SET epoch = 0",
    "UPDATE experiment SET id = 2",
    "INSERT INTO experiment (id, project, name) VALUES (1, 'another', 'one')",
    "UPDATE feedback SET event_id = 'one'",
    "UPDATE feedback SET value = NULL",
    "DELETE FROM exchanges",
    "DELETE FROM epochs",
    "DELETE FROM versions",
]
NO_NUMBERS = {
    "sqlite": ["9e999", "-9e999", "9e999 - 9e999"],
    "postgresql": ["'Infinity'", "'-Infinity'", "'NaN'"],
}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A database with an experience in each state but expired. What it refuses, none of these tests changes in it."""
    place = Place(f"sqlite:///{tmp_path_factory.mktemp('full')}/ledger.db", None)
    if request.param == "postgres":
        place = Place(request.getfixturevalue("postgres_url"), "full")
    with tables_at(place, request):
        engine = database.connect(place.url, schema=place.schema)
        _fill(Ledger(engine))
        yield engine
        engine.dispose()


def _fill(ledger: Ledger) -> None:
    ledger.own("shop", "assistant")
    ledger.versions.ensure_base(Path("/base"))
    trained(ledger)
    leased(ledger)
    committed(ledger)
    rewarded(ledger)
    ledger.recording.record([exchange(), exchange(experiences=(experience(drop_reason="cut off"),))])
    assert {state for state, count in ledger.reports.counts().items() if count == 0} == {State.EXPIRED}


def refused(engine: Engine, statement: str) -> None:
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text(statement))


@pytest.mark.parametrize("change", EXPERIENCES)
def test_an_experience_cannot_be_what_makes_no_sense(full: Engine, change: str) -> None:
    refused(full, f"UPDATE experiences SET {change}")


@pytest.mark.parametrize("change", VERSIONS)
def test_a_version_cannot_be_what_makes_no_sense(full: Engine, change: str) -> None:
    refused(full, f"UPDATE versions SET {change}")


@pytest.mark.parametrize("statement", OTHERS)
def test_the_other_tables_refuse_what_makes_no_sense(full: Engine, statement: str) -> None:
    refused(full, statement)


@pytest.mark.parametrize(("table", "column"), [("experiences", "reward"), ("feedback", "value")])
def test_a_reward_is_a_number_that_is_finite(full: Engine, table: str, column: str) -> None:
    for value in NO_NUMBERS[full.dialect.name]:
        refused(full, f"UPDATE {table} SET {column} = {value} WHERE {column} IS NOT NULL")
