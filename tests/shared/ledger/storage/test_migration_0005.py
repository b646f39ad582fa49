"""What 0005 makes of the rows of 0004, and what is left of new rows on the way back."""

from collections.abc import Iterator
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Connection, Engine, text
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database

STATES = ("retired", "champion", "rejected", "candidate")


@pytest.fixture
def before(place: Place) -> Iterator[Engine]:
    """A database of 0004 with a version in each state, one of them trained on a reply."""
    engine = database.connect(place.url, schema=place.schema)
    with engine.begin() as connection:
        if place.schema is not None:
            connection.execute(CreateSchema(place.schema))
        _move(connection, "0004")
        insert(connection, "epochs", epoch=1, trainer="t", started_at=1.0, seen_at=1.0)
        insert(connection, "reward_rules", id=1, definition="{}", created_at=1.0)
        for number, state in enumerate(STATES):
            version = {"version": number, "state": state, "step": number, "path": "/p", "created_at": 1.0}
            trained = {"epoch": 1, "manifest_sha256": "5" * 64} if number else {}
            but = {"reason": "NaN"} if state == "rejected" else {}
            insert(connection, "versions", **version, **trained, **but, consumed=int(number == 1), served_at=2.0)
        said = {"msg_id": "m", "tenant": "acme", "endpoint": "/", "request": b"{}", "received_at": 1.0}
        insert(connection, "exchanges", **said, latency_s=1.0)
        row = {"msg_id": "m", "choice": 0, "correction": 0, "tenant": "acme", "priority": 0.0, "state": "trained"}
        row |= {"version_min": 0, "version_max": 0, "temperature": 1.0, "text": "", "completion_tokens": 0}
        row |= {"reward": 1.0, "reward_rule": 1, "rewarded_at": 2.0, "committed_at": 3.0, "trained_version": 1}
        insert(connection, "experiences", **row, blob=b"\0", sampled_at=1.0)
    yield engine
    engine.dispose()


def _move(connection: Connection, to: str, *, back: bool = False) -> None:
    config = database.migrations()
    config.attributes["connection"] = connection
    (command.downgrade if back else command.upgrade)(config, to)


def insert(connection: Connection, table: str, **row: Any) -> None:
    names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)


def rows(engine: Engine, table: str) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1"))]


def test_every_row_stays_as_it_is(before: Engine, place: Place) -> None:
    old = {table: rows(before, table) for table in ("versions", "exchanges", "experiences")}
    database.upgrade(place.url, schema=place.schema)
    assert rows(before, "versions") == [row | {"pinned": False} for row in old["versions"]]
    assert rows(before, "exchanges") == [
        row | {"engine": None, "key": None, "stored_bytes": 0} for row in old["exchanges"]
    ]
    assert rows(before, "experiences") == [
        row | {"grammar": None, "edit_similarity": None} for row in old["experiences"]
    ]
    assert Ledger(before).reports.audit() == []
    assert Ledger(before).versions.events() == []


def test_what_was_served_before_there_were_events_can_be_gone_back_to(before: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    assert Ledger(before).versions.roll_back(1, by="anna", reason="no") == 0


def test_the_way_back_leaves_old_rows_as_they_were(before: Engine, place: Place) -> None:
    old = {table: rows(before, table) for table in ("versions", "exchanges", "experiences")}
    database.upgrade(place.url, schema=place.schema)
    with before.begin() as connection:
        _move(connection, "0004", back=True)
    assert {table: rows(before, table) for table in old} == old


def test_the_way_back_keeps_what_must_not_serve_from_serving(before: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    ledger = Ledger(before)
    ledger.versions.begin_canary(3, by="explorer", reason="a tenth")
    ledger.versions.pin(0, instead_of=1, by="anna", reason="the release")
    ledger.versions.unpin(by="anna")
    ledger.versions.roll_back(0, by="anna", reason="no")
    with before.begin() as connection:
        _move(connection, "0004", back=True)
    found = [(row["state"], row["reason"]) for row in rows(before, "versions")]
    assert found == [("rejected", "no"), ("champion", None), ("rejected", "NaN"), ("retired", None)]
