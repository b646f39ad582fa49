"""What 0006 makes of the rows of 0005, and what is left of replies that a grammar held on the way back."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from tests.conftest import Place
from tests.shared.ledger.storage.test_migration_0004 import COMMITTED, OLD, TRAINED, _move, database_at, give, rows
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database


@pytest.fixture
def before(place: Place) -> Iterator[Engine]:
    """A database of 0005 with a reply in each state."""
    with database_at("0005", place) as engine:
        yield engine


def test_every_row_stays_as_it_is(before: Engine, place: Place) -> None:
    old = rows(before)
    database.upgrade(place.url, schema=place.schema)
    assert rows(before) == [row | {"grammar": None, "edit_similarity": None} for row in old]
    assert Ledger(before).reports.audit() == []


def test_the_way_back_leaves_no_reply_that_was_held_for_a_sample(before: Engine) -> None:
    old = rows(before)
    with before.begin() as connection:
        _move(connection, "0006")
        for state, but in OLD.items():
            give(connection, f"held, {state}", state, **but, grammar=b"{}")
        give(connection, "held, marked", "committed", **COMMITTED, grammar=b"{}", unsampled="mixed_version")
    with before.begin() as connection:
        _move(connection, "0005", back=True)
    assert rows(before)[: len(old)] == old
    found = {row["msg_id"].removeprefix("held, "): row for row in rows(before)[len(old) :]}
    assert found["marked"]["unsampled"] == "mixed_version"
    assert {row["unsampled"] for name, row in found.items() if name != "marked"} == {"sampling:grammar"}
    leased = found["leased"]
    assert (leased["state"], leased["reason"], leased["lease_epoch"]) == (State.DROPPED, "sampling:grammar", None)
    assert {found[state]["state"] for state in ("trained",)} == {State.TRAINED}
    assert found["trained"]["trained_version"] == TRAINED["trained_version"]
