"""Two explorers, each with an outbox of its own, hear corrections of the same replies: the last word is the reward."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from tests.conftest import Place
from tests.doubles import postgres
from tests.doubles.engine import EngineDouble
from tests.explorer.outages.test_clocks import Explorers, chat
from tests.explorer.running import eventually
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences

REPLIES, MINUTE = 100, 60.0

#: What is said of a reply, by turns: each explorer hears twice the same, but for what the other one heard between.
WORDS = (0.25, 0.75, 0.25, 1.0, 0.25)


@pytest.fixture
def server() -> Iterator[postgres.PostgresServer]:
    found = postgres.started()
    yield found
    found.close()


def say(services: list[httpx.Client], replies: list[str]) -> dict[str, float]:
    """Correct each reply by turns; the last word of each."""
    for turn, word in enumerate(WORDS):
        for number, each in enumerate(replies):
            asked = {"msg_ids": [each], "reward": (word + number / 1000) / 2}
            assert services[(turn + number) % 2].post("/feedback", json=asked).status_code == 200
    return {each: (WORDS[-1] + number / 1000) / 2 for number, each in enumerate(replies)}


@pytest.mark.postgres
@pytest.mark.contract
@pytest.mark.parametrize(("ahead_s", "away_s"), [(0.0, 10.0), (MINUTE, 0.0), (-MINUTE, 10.0)])
def test_the_last_word_counts_whoever_heard_it(
    tmp_path: Path,
    doubles: list[EngineDouble],
    monkeypatch: pytest.MonkeyPatch,
    server: postgres.PostgresServer,
    ahead_s: float,
    away_s: float,
) -> None:
    place = Place(server.url, "exp_buffer")
    explorers = Explorers(tmp_path, place, dict(zip(("one", "other"), doubles, strict=True)), monkeypatch)
    with explorers.running("one", ahead_s=0.0) as one, explorers.running("other", ahead_s=ahead_s) as other:
        replies = [chat(one) for _ in range(REPLIES)]
        eventually(lambda: one.post("/commit", json={"task_id": "nobody"}).status_code == 200)
        if away_s:
            server.stop()
        began = time.monotonic()
        last = say([one, other], replies)
        if away_s:
            time.sleep(max(0.0, began + away_s - time.monotonic()))
            server.start()
        for each in (one, other):
            eventually(lambda: each.post("/commit", json={"task_id": "nobody"}).status_code == 200)  # noqa: B023
        engine = connect(place.url, schema=str(place.schema))
        with engine.connect() as connection:
            found = connection.execute(select(experiences.c.msg_id, experiences.c.reward)).all()
        engine.dispose()
        assert {row.msg_id: row.reward for row in found} == last
        if ahead_s:
            with closing(explorers.ledger()) as ledger:
                eventually(lambda: [alarm.name for alarm in ledger.alarms.all()] == ["clock_skew"])
