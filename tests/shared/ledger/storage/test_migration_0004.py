"""What 0004 makes of the rows of 0003, and what is left of new rows on the way back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Connection, Engine, text
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.ledger.storage import database

COMMITTED = {"reward": 1.0, "reward_rule": 1, "rewarded_at": 2.0, "committed_at": 3.0}
LEASED = COMMITTED | {"lease_epoch": 1, "lease_until": 99.0}
TRAINED = COMMITTED | {"trained_version": 1}
OLD: dict[str, dict[str, Any]] = {
    "recorded": {},
    "committed": COMMITTED,
    "leased": LEASED,
    "trained": TRAINED,
    "dropped": {"reason": "sampling:top_p"},
}


@pytest.fixture
def before(place: Place) -> Iterator[Engine]:
    """A database of 0003 with a reply in each of these states."""
    with database_at("0003", place) as engine:
        yield engine


@contextmanager
def database_at(step: str, place: Place) -> Iterator[Engine]:
    """A database of a step, with a reply in each of the states of `OLD`."""
    engine = database.connect(place.url, schema=place.schema)
    with engine.begin() as connection:
        if place.schema is not None:
            connection.execute(CreateSchema(place.schema))
        _move(connection, step)
        insert(connection, "epochs", epoch=1, trainer="t", started_at=1.0, seen_at=1.0)
        version = {"version": 1, "state": "candidate", "step": 1, "epoch": 1, "path": "/p", "manifest_sha256": "5" * 64}
        insert(connection, "versions", **version, consumed=1, created_at=1.0)
        insert(connection, "reward_rules", id=1, definition="{}", created_at=1.0)
        for state, but in OLD.items():
            give(connection, state, state, **but)
    yield engine
    engine.dispose()


def _move(connection: Connection, to: str, *, back: bool = False) -> None:
    config = database.migrations()
    config.attributes["connection"] = connection
    (command.downgrade if back else command.upgrade)(config, to)


def insert(connection: Connection, table: str, **row: Any) -> None:
    names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)


def give(connection: Connection, msg_id: str, state: str, **but: Any) -> None:
    said = {"msg_id": msg_id, "tenant": "acme", "endpoint": "/", "request": b"{}", "received_at": 1.0, "latency_s": 1.0}
    insert(connection, "exchanges", **said)
    row = {"msg_id": msg_id, "choice": 0, "correction": 0, "tenant": "acme", "priority": 0.0, "state": state}
    row |= {"version_min": 0, "version_max": 0, "temperature": 1.0, "text": "", "completion_tokens": 0, "blob": b"\0"}
    insert(connection, "experiences", **row, sampled_at=1.0, **but)


def rows(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(text("SELECT * FROM experiences ORDER BY id"))]


def test_every_row_stays_as_it_is(before: Engine, place: Place) -> None:
    old = rows(before)
    database.upgrade(place.url, schema=place.schema)
    assert rows(before) == [row | {"unsampled": None, "grammar": None, "edit_similarity": None} for row in old]
    assert Ledger(before).reports.audit() == []
    assert Ledger(before).alarms.all() == []


def test_the_way_back_leaves_old_rows_as_they_were(before: Engine, place: Place) -> None:
    old = rows(before)
    with before.begin() as connection:
        _move(connection, "0004")
    with before.begin() as connection:
        _move(connection, "0003", back=True)
    assert rows(before) == old


def test_on_the_way_back_what_is_no_sample_of_the_policy_is_dropped(before: Engine) -> None:
    """The release before would take it for one."""
    why = {"unsampled": "sampling:top_k"}
    with before.begin() as connection:
        _move(connection, "0004")
        for state, but in OLD.items():
            give(connection, f"no sample, {state}", state, **but, **why)
    Ledger(before).alarms.raise_alarm(Alarm("length", "it grew"))
    with before.begin() as connection:
        _move(connection, "0003", back=True)
    found = {row["msg_id"]: (row["state"], row["reason"], row["lease_epoch"]) for row in rows(before)}
    expected = {state: (State.DROPPED, "sampling:top_k", None) for state in ("recorded", "committed", "leased")}
    expected |= {"trained": (State.TRAINED, None, None), "dropped": (State.DROPPED, "sampling:top_p", None)}
    assert {state: found[f"no sample, {state}"] for state in OLD} == expected
    assert {state: found[state][0] for state in OLD} == {state: state for state in OLD}
    with before.begin() as connection:
        _move(connection, "0004")
    assert Ledger(before).alarms.all() == []
