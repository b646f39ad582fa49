"""What 0003 makes of exchanges that were there before: they are listed, and found as if they were recorded now."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, text
from sqlalchemy.schema import CreateSchema

from tests.conftest import Place
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.completion_object import tags_of
from tuneloop.shared.ledger.storage import codec, database

#: Requests by the msg_id of their exchange.
REQUESTS: dict[str, Any] = {
    "plain": {"model": "m", "messages": []},
    "labelled": {"model": "m", "metadata": {"task_id": "t", "run_id": 3, "f": 1.5, "x": [1, "ä"], "none": None}},
    "packed": {"model": "m", "messages": ["long " * 500], "metadata": {"k": "v" * 512}},
    "many": {"metadata": {f"k{number}": "v" for number in range(40)}},
    "too long": {"model": "n", "metadata": {"k" * 65: "v", "k": "v" * 513}},
    "odd": {"model": 3, "metadata": "none"},
    "no object": [1],
}


@pytest.fixture
def before(place: Place) -> Iterator[Engine]:
    """A database of 0002 with these exchanges, one that is no JSON, and one of another endpoint."""
    engine = database.connect(place.url, schema=place.schema)
    config = database.migrations()
    with engine.begin() as connection:
        if place.schema is not None:
            connection.execute(CreateSchema(place.schema))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        for at, (msg_id, request) in enumerate(REQUESTS.items()):
            insert(connection, msg_id, json.dumps(request).encode(), received_at=float(at))
        insert(connection, "broken", b"no json", received_at=50.0)
        insert(connection, "text", b'{"model": "m"}', endpoint="/v1/completions", received_at=51.0)
        for number in range(600):  # more than are looked at in one go
            insert(connection, f"z{number}", b'{"model": "z"}', received_at=100.0 + number)
    yield engine
    engine.dispose()


def insert(connection: Any, msg_id: str, request: bytes, **but: Any) -> None:
    row = {"msg_id": msg_id, "endpoint": "/v1/chat/completions", "request": codec.pack_text(request)} | but
    connection.execute(
        text(
            "INSERT INTO exchanges (msg_id, tenant, endpoint, request, received_at, latency_s) "
            "VALUES (:msg_id, 'acme', :endpoint, :request, :received_at, 1)"
        ),
        row,
    )


def test_what_was_there_is_found_as_if_it_were_recorded_now(before: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    expected = {
        (msg_id, tag) for msg_id, said in REQUESTS.items() for tag in tags_of("acme", json.dumps(said).encode())
    }
    expected |= {(f"z{number}", tag) for number in range(600) for tag in tags_of("acme", b'{"model": "z"}')}
    with before.connect() as connection:
        rows = connection.execute(text("SELECT msg_id, tag, received_at FROM tags")).all()
        times = {name: at for name, at in connection.execute(text("SELECT msg_id, received_at FROM exchanges"))}
    assert {(row.msg_id, bytes(row.tag)) for row in rows} == expected
    assert all(row.received_at == times[row.msg_id] for row in rows)
    page = Ledger(before).stored.page("acme", after=None, order="asc", limit=10)
    assert page is not None
    assert [each.msg_id for each in page.found][:8] == [*REQUESTS, "broken"]
