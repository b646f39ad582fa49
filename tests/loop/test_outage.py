"""The database goes away in mid-traffic and comes back: users notice nothing, and nothing they were told is lost.

Explorer and PostgreSQL are real, and are processes; the engine is the double.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.doubles import postgres
from tests.doubles.engine import EngineDouble
from tests.doubles.serving import serving
from tests.loop.harness.services import Service, wait_for
from tests.loop.harness.users import Book, Users, attached_settings
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.storage.schema import experiences, feedback

pytestmark = pytest.mark.contract

DRAIN_S = 30.0


@dataclass
class Stage:
    """An explorer under load, on a PostgreSQL of its own."""

    config: Path
    server: postgres.PostgresServer
    explorer: Service
    book: Book

    def restart_explorer(self) -> tuple[float, float]:
        """SIGKILL it and start it again; returns from when until when users may have noticed."""
        killed = time.monotonic()
        self.explorer.kill()
        self.explorer = Service(self.config, "explorer")
        self.explorer.wait_until_ready()
        return killed, time.monotonic()

    def serve(self, count: int = 30) -> None:
        """Return when so many more replies have reached their users."""
        until = len(self.book.replies) + count
        wait_for(lambda: len(self.book.replies) >= until, why="users get no answers")

    def seconds_to_drain(self) -> float:
        """How long it takes until all that was acknowledged until now is in the database."""
        started, said, heard = time.monotonic(), set(self.book.replies), set(self.book.acknowledged)
        wait_for(lambda: not said - set(self.stored()) and not heard - self.heard(), why="it is not drained")
        return time.monotonic() - started

    def stored(self) -> list[str]:
        """The ids of the replies in the database, in the order in which they came."""
        return self._column(select(experiences.c.msg_id).order_by(experiences.c.id))

    def heard(self) -> set[str]:
        """The ids of the replies whose feedback is in the database."""
        return set(self._column(select(feedback.c.msg_id)))

    def _column(self, query: object) -> list[str]:
        engine = connect(self.server.url, schema="exp_buffer")
        with engine.connect() as connection:
            found = list(connection.execute(query).scalars())
        engine.dispose()
        return found

    def assert_nothing_was_lost(self) -> None:
        stored = self.stored()
        place = {msg_id: number for number, msg_id in enumerate(stored)}
        assert len(place) == len(stored), "a reply is stored twice"
        assert self.book.replies - place.keys() == set()
        assert self.book.acknowledged.keys() - self.heard() == set()
        for lane in self.book.lanes.values():
            places = [place[msg_id] for msg_id in lane]
            assert places == sorted(places), "the order is not kept"


@contextmanager
def stage(folder: Path) -> Iterator[tuple[Stage, Users]]:
    server = postgres.started()
    buffer = {"trainer_input": {"experience_buffer": {"path": server.url}}}
    with serving(EngineDouble(answers_probes_by_manifest=True, piece_pause_s=0.002)) as url:
        config = attached_settings(folder, url, buffer=buffer)
        explorer = Service(config, "explorer")
        users = Users(explorer.url, thought_s=0.1)
        found = Stage(config, server, explorer, users.book)
        try:
            explorer.wait_until_ready()
            yield found, users
        finally:
            found.explorer.kill()
            server.close()


@pytest.mark.postgres
def test_while_postgres_is_away_and_the_explorer_is_killed_nothing_is_lost(tmp_path: Path) -> None:
    with stage(tmp_path) as (on, users):
        with users:
            on.serve()
            on.server.stop("immediate")
            on.serve(100)
            killed, ready = on.restart_explorer()
            on.serve(100)
            on.server.start()
            drained = on.seconds_to_drain()
            on.serve()
        on.seconds_to_drain()
        outside = [each for each in on.book.failures if each.at < killed or each.sent > ready]
        assert outside == []
        assert drained < DRAIN_S
        on.assert_nothing_was_lost()


@pytest.mark.postgres
def test_postgres_restarts_in_mid_traffic_and_nobody_notices(tmp_path: Path) -> None:
    with stage(tmp_path) as (on, users):
        with users:
            for how in ("fast", "immediate", "fast", "immediate"):
                on.serve()
                on.server.stop(how)
                on.server.start()
            on.serve()
        assert on.seconds_to_drain() < DRAIN_S
        assert on.book.failures == []
        on.assert_nothing_was_lost()
