"""SIGKILL at random moments under load, to every process there is.

The engine is the double that replays vLLM's bytes, so that a run of many kills takes minutes; explorer, trainer and
database are real.
"""

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tests.doubles.engine import MODEL
from tests.doubles.postmaster import Postmaster
from tests.loop.harness.crowd import Crowd
from tests.loop.harness.lineage import Lineage
from tests.loop.harness.services import (
    Service,
    command_of,
    descendants,
    free_port,
    make_model,
    started,
    wait_for,
    write_settings,
)
from tests.loop.harness.verdict import Found, Verdict, judge, version_rows
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect

BATCH, STEPS_PER_VERSION, LANES = 32, 2, 12

#: The policy that is trained beside the default one.
POLICY = "side"

#: What a service logs when it has all that it needs: from then on, nothing but a signal may end it.
_UP = {"explorer": b"explorer_listening", "trainer": b"trainer_ready"}
_SETTLED_S = 600
#: How often a service is killed while it works; else it may be while it starts, which takes a trainer most of its time.
_AT_WORK = 0.8
#: How long the database takes nothing before a kill that is to hit a drain with a backlog, at most.
_LONGEST_STOP_S = 2.0
#: Whose kills hit a drain with a backlog, or files that begin and go.
_RECORDING = ("explorer", "worker", "postmaster", "backend")
#: Seconds until a kill, at most. A trainer gets the time to publish a few versions.
_LONGEST_PAUSE_S = {"trainer": 6.0}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What happened, and what came of it. `moments`: how many kills hit what."""

    kills: dict[str, int]
    moments: dict[str, int]
    exchanges: int
    feedbacks: int
    sent_twice: int
    corrected: int
    versions: dict[int, int]
    states: dict[str, int]
    started_again: dict[str, int]
    load_s: int
    verdict: Verdict


class Stage:
    """The processes of a loop. Whoever is killed is started again at once, and so is who ends by itself."""

    def __init__(self, config: Path, engine_port: int, server: Postmaster | None, chance: random.Random) -> None:
        self.kills: Counter[str] = Counter()
        self.started_again: Counter[str] = Counter()
        self.gave_up: list[str] = []
        self._config, self._engine_port, self._server, self._chance = config, engine_port, server, chance
        self._begun: dict[str, int] = {}
        self._start_engine()
        self._services = {name: self._service(name) for name in _UP}

    @property
    def deck(self) -> list[str]:
        """A trainer takes long to start, and does nothing worth a kill before."""
        others = ["postmaster", "backend"] if self._server else ["explorer", "worker"]
        return ["trainer", "engine", "explorer", "worker", *others]

    @property
    def explorer(self) -> Service:
        return self._services["explorer"]

    def at_work(self, kind: str) -> bool:
        return kind not in self._services or _UP[kind] in self._said(kind)

    def kill(self, kind: str) -> None:
        self.kills[kind] += 1
        if kind == "engine":
            self._kill_engine()
            self._start_engine()
        elif kind in self._services:
            self._services[kind].kill()
            self._services[kind] = self._service(kind)
        elif kind == "worker":
            below = descendants(self.explorer.process.pid)
            for pid in (pid for pid in below if "tuneloop.explorer.processes.worker" in command_of(pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif self._server and kind == "postmaster":
            self._server.kill()
        elif self._server:
            self._server.kill_backend(self._chance)

    def revive(self) -> None:
        """Start what has ended by itself: a service may refuse to start without its database."""
        for name, service in self._services.items():
            if service.process.poll() is not None:
                if _UP[name] in (said := self._said(name)):
                    self.gave_up.append(f"{name}: {said.decode(errors='replace').splitlines()[-1]}")
                self.started_again[name] += 1
                self._services[name] = self._service(name)

    def close(self) -> None:
        for service in self._services.values():
            service.kill()
        self._kill_engine()

    def _service(self, name: str) -> Service:
        log = self._config.parent / f"{name}.log"
        self._begun[name] = log.stat().st_size if log.exists() else 0
        return Service(self._config, name)

    def _said(self, name: str) -> bytes:
        """What a service has logged since it was started."""
        with self._services[name].log.open("rb") as log:
            log.seek(self._begun[name])
            return log.read()

    def _start_engine(self) -> None:
        command = [sys.executable, "-m", "tests.doubles.engine_process", str(self._engine_port)]
        self._engine = started(command, self._config.parent / "engine.log")

    def _kill_engine(self) -> None:
        self._engine.kill()
        self._engine.wait()


def run(
    folder: Path,
    *,
    kills: int,
    exchanges: int = 0,
    postgres: bool = False,
    policies: bool = False,
    seed: int = 0,
    longest_pause_s: float = 2.5,
) -> Report:
    """Kill something until there were so many `kills`, and so many `exchanges`; with `policies` two are trained."""
    chance, lineage, moments = random.Random(seed), Lineage(BATCH), Counter[str]()
    models = [MODEL, POLICY] if policies else [MODEL]
    with _stage(folder, chance, postgres=postgres, policies=policies) as stage:
        settings = stage.explorer.settings
        database = connect(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
        begun = time.monotonic()
        with Crowd(stage.explorer.url, lanes=LANES, seed=seed, models=models) as crowd:
            for kind in _deck(stage.deck, chance):
                if crowd.gave_up or (stage.kills.total() >= kills and len(crowd.book.replies) >= exchanges):
                    break
                if chance.random() < _AT_WORK:
                    _until_at_work(stage, crowd, kind)
                _pause(stage, chance.uniform(0.05, _LONGEST_PAUSE_S.get(kind, longest_pause_s)))
                _look(lineage, database)
                if kind in _RECORDING:
                    moments[_busy_moment(database, chance)] += 1
                stage.kill(kind)
            wait_for(lambda: stage.revive() or _ready(stage), why="the explorer does not come back")
        load_s = round(time.monotonic() - begun)
        _settle(stage, database, lineage, left=len(models) * BATCH * STEPS_PER_VERSION)
        try:
            ledger = Ledger(database)
            more: dict[str, Any] = {"moments": dict(moments)}
            more |= {"imbalance": ledger.reports.imbalance(), "set_aside": len(ledger.recording.refused_records())}
            return _report(stage, crowd, Found(database), lineage, load_s=load_s, **more)
        finally:
            database.dispose()


@contextmanager
def _stage(folder: Path, chance: random.Random, *, postgres: bool, policies: bool) -> Iterator[Stage]:
    server, port = Postmaster() if postgres else None, free_port()
    stage = Stage(_settings(folder, port, server.url if server else None, policies=policies), port, server, chance)
    try:
        stage.explorer.wait_until_ready()
        yield stage
    finally:
        stage.close()
        if server:
            server.close()


def _settings(folder: Path, engine_port: int, database: str | None, *, policies: bool) -> Path:
    experience_buffer = {"path": database} if database else {}
    buffer = {"train_batch_size": BATCH, "trainer_input": {"experience_buffer": experience_buffer}}
    config = write_settings(folder, make_model(folder / "model"), buffer=buffer)
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    values["explorer"]["rollout_model"] = {"engine_urls": [f"http://127.0.0.1:{engine_port}"], "dtype": "float32"}
    values["trainer"] |= {"save_interval": STEPS_PER_VERSION, "max_checkpoints_to_keep": 20, "async_save": True}
    if policies:
        values["model"]["lora"] = {"rank": 4}
        values["policies"] = {POLICY: {}}
    config.write_text(yaml.safe_dump(values))
    return config


def _deck(kinds: list[str], chance: random.Random) -> Iterator[str]:
    """In random order, but none much more often than it is in the deck."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def _busy_moment(database: Engine, chance: random.Random) -> str:
    """Return when the drain has a backlog, or when files begin and go: such a kill is to hit."""
    if is_drain := chance.random() < 0.5:
        with suppress(DBAPIError), database.execution_options(sqlite_begin="IMMEDIATE").begin() as connection:
            if database.dialect.name == "postgresql":
                connection.execute(text("LOCK TABLE outbox_files IN ACCESS EXCLUSIVE MODE"))
            time.sleep(chance.uniform(0.5, _LONGEST_STOP_S))
    else:
        with suppress(LedgerError):  # each erasure has all files closed, and removed once they are drained
            Ledger(database).retention.erase("default", f"nobody {chance.random()}")
    time.sleep(chance.uniform(0, 0.2 if is_drain else 0.5))
    return "drain" if is_drain else "rotation"


def _until_at_work(stage: Stage, crowd: Crowd, kind: str) -> None:
    """Wait for what is to be killed, and for a reply: kills that come faster than starts would let nobody get one."""
    before = len(crowd.book.replies)

    def at_work() -> bool:
        stage.revive()
        return crowd.gave_up or (stage.at_work(kind) and len(crowd.book.replies) > before)

    wait_for(at_work, timeout_s=120, why=f"no {kind} starts, or nobody gets a reply")


def _pause(stage: Stage, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        threading.Event().wait(min(left, 0.2))
        stage.revive()


def _ready(stage: Stage) -> bool:
    try:
        return httpx.get(f"{stage.explorer.url}/health/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def _look(lineage: Lineage, database: Engine) -> None:
    with suppress(OperationalError):  # it has just been killed
        lineage.look(version_rows(database))


def _settle(stage: Stage, database: Engine, lineage: Lineage, *, left: int) -> None:
    """Wait until all that was acknowledged is in the database, and fewer rows than `left` wait for a version."""
    deadline, ledger = time.monotonic() + _SETTLED_S, Ledger(database)
    # Answered only when the outbox is empty; nobody has this task.
    while not _posted(f"{stage.explorer.url}/commit", {"task_id": "nobody"}):
        assert time.monotonic() < deadline, "the outbox does not get into the database"
        _pause(stage, 0.2)
    while (counts := ledger.reports.counts())[State.COMMITTED] + counts[State.LEASED] >= left:
        assert time.monotonic() < deadline, f"the trainer does not get through: {counts}"
        _pause(stage, 0.2)
        _look(lineage, database)
    _look(lineage, database)


def _posted(url: str, body: dict[str, str]) -> bool:
    try:
        return httpx.post(url, json=body, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def _report(stage: Stage, crowd: Crowd, found: Found, lineage: Lineage, **more: Any) -> Report:
    judgements = crowd.book.judgements.values()
    return Report(
        kills=dict(stage.kills),
        moments=more["moments"],
        exchanges=len(crowd.book.replies),
        feedbacks=sum(len(each.acknowledged) for each in judgements),
        sent_twice=sum(len(each.acknowledged) > len(set(each.acknowledged)) for each in judgements),
        corrected=sum(len(set(each.acknowledged)) > 1 for each in judgements),
        versions=dict(Counter(row.policy for row in found.versions if row.consumed)),
        states=dict(found.states),
        started_again=dict(stage.started_again),
        load_s=more["load_s"],
        verdict=judge(
            crowd.book,
            found,
            lineage=lineage,
            imbalance=more["imbalance"],
            quarantined=more["set_aside"],
            gave_up=stage.gave_up,
        ),
    )
