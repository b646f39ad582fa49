"""What 0015 makes of the rows of 0014, and what is left of replies that were edited and not rated on the way back."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from tests.conftest import Place
from tests.factories import exchange, experience, feedback
from tests.shared.ledger.storage.test_migration_0004 import _move, database_at, rows
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database


@pytest.fixture
def before(place: Place) -> Iterator[Engine]:
    """A database of 0014 with a reply in each state."""
    with database_at("0014", place) as engine:
        yield engine


def test_every_row_stays_as_it_is(before: Engine, place: Place) -> None:
    old = rows(before)
    database.upgrade(place.url, schema=place.schema)
    assert rows(before) == [row | {"edit_similarity": None} for row in old]
    assert Ledger(before).reports.audit() == []


def test_the_way_back_leaves_the_likeness_as_the_reward(before: Engine, place: Place) -> None:
    database.upgrade(place.url, schema=place.schema)
    told = exchange(experiences=(experience(text="10"),))
    edit = {"kind": Kind.DEMONSTRATION, "metric": "demonstration", "value": None, "text": "18"}
    Ledger(before).recording.record([told, feedback(msg_id=told.msg_id, **edit)])
    [edited] = [row for row in rows(before) if row["msg_id"] == told.msg_id]
    assert (edited["state"], edited["reward"], edited["edit_similarity"]) == ("rewarded", None, 0.5)
    with before.begin() as connection:
        _move(connection, "0014", back=True)
    del edited["edit_similarity"]
    assert edited | {"reward": 0.5} in rows(before)
