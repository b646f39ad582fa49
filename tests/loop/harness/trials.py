"""An explorer that tries versions while its regular users ask, and what is seen of that from outside."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Select

from tests.doubles.postgres import PostgresServer
from tests.loop.harness.regulars import USERS, Failure, Regulars
from tests.loop.harness.services import Service, wait_for
from tuneloop.explorer.engines.fleet import TrafficSplit
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.ledger.versions.versions import VersionEvent


@dataclass
class Stage:
    """An explorer with its users, and the database that it keeps its books in; `gaps` are when it was away itself."""

    config: Path
    server: PostgresServer
    service: Service
    ledger: Ledger
    users: Regulars
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def until(self, version: int, state: VersionState) -> VersionEvent:
        """Wait until a version has come to a state; what brought it there."""

        def come() -> bool:
            found = self.ledger.versions.get(version)
            return found is not None and found.state is state

        wait_for(come, timeout_s=120, why=f"version {version} is not {state}: {self.service.log}")
        return self.ledger.versions.events(version)[-1]

    def until_ready(self) -> None:
        """Wait until both engines answer."""
        told = 'tuneloop_engines{state="ready"} 2.0'
        url = f"{self.service.url}/metrics"
        wait_for(lambda: told in httpx.get(url, timeout=60).text, timeout_s=120, why="no two engines")

    def until_it_answers(self, version: int) -> float:
        """Wait until a version answers users who ask from now on; since when it does."""
        now = time.time()
        wait_for(lambda: any(each.version == version for each in self.users.since(now)), why=f"{version} is silent")
        return next(each.heard for each in self.users.since(now) if each.version == version)

    def until_it_alone_answers(self, version: int) -> None:
        """Wait until a version answers everybody."""
        wait_for(lambda: [each.version for each in self.users.answers[-20:]] == [version] * 20, why="others answer too")
        now = time.time()
        self.serve(len(USERS))
        assert {each.version for each in self.users.since(now)} == {version}

    def serve(self, count: int) -> None:
        """Return when so many more users have been answered."""
        until = len(self.users.answers) + count
        wait_for(lambda: len(self.users.answers) >= until, timeout_s=120, why="users get no answers")

    def actions(self, version: int) -> list[str]:
        return [str(each.action) for each in self.ledger.versions.events(version)]

    def rows(self, query: "Select[Any]") -> Sequence[Any]:
        engine = connect(self.server.url, schema="exp_buffer")
        with engine.connect() as connection:
            found = connection.execute(query).all()
        engine.dispose()
        return found

    def kill_and_start_again(self) -> None:
        """SIGKILL the control process, and start another."""
        killed = time.time()
        os.kill(self.service.process.pid, signal.SIGKILL)
        self.service.process.wait()
        self.service = Service(self.config, "explorer")
        self.service.wait_until_ready()
        self.gaps.append((killed, time.time()))

    def failures(self) -> list[Failure]:
        """The requests that failed though there was an explorer."""
        return [
            each
            for each in self.users.failures
            if all(each.at < killed or each.sent > ready for killed, ready in self.gaps)
        ]

    def assert_it_got_its_share_and_no_more(self, version: int, began: float, ended: float) -> None:
        """From `began` to `ended` it answered the users whom the hash gives it, always, and nobody else."""
        split = TrafficSplit(version, share=self.service.settings.rollout.tried_share)
        met = [each for each in self.users.since(began) if each.heard < ended]
        assert [each for each in met if (each.version == version) != split.answers(f"default:{each.user}")] == []
        assert len(met) > len(USERS) / 2
        assert abs(sum(each.version == version for each in met) / len(met) - split.share) < 0.2
