"""An upgrade in the order of docs/several_machines.md, under load: an earlier release by its checkout, behind HAProxy.

Clients ask, stream, rate and commit all the while, and the trainer of each release makes versions that are served.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg
import pytest
import yaml

from tests.databases import Schemas
from tests.deploy.prometheus import ROOT
from tests.doubles.engine import CHAT, MODEL, engine_place
from tests.explorer.running import HELLO, eventually
from tests.hostile.fronts import environment, program_of
from tests.loop.harness.services import free_port, make_model, started, write_settings
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect

#: The last commit with a spool; its schema is 0016.
BEFORE = "f6ec71b0"

SCHEMA = "upgrade"

_HAPROXY = """
defaults
  mode http
  option redispatch
  retries 3
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout check 20s
frontend users
  bind 127.0.0.1:{port}
  default_backend explorers
backend explorers
  option httpchk GET /health/ready
  default-server check inter 200ms fall 1 rise 1
  server old 127.0.0.1:{old}
  server new 127.0.0.1:{new}
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release before, as it was committed."""
    folder = tmp_path_factory.mktemp("before")
    if (
        shutil.which("git") is None
        or subprocess.run(
            ["git", "cat-file", "-e", f"{BEFORE}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
        ).returncode
    ):
        pytest.skip(f"THE HISTORY IS NOT HERE: nothing is upgraded from {BEFORE}")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    subprocess.run(["scripts/links", "build/links"], cwd=folder, check=True)
    return folder


@dataclass(frozen=True)
class Release:
    """A checkout of tuneloop, whose services are started with the settings of one file."""

    root: Path
    settings: Path

    def started(self, what: str, name: str, **given: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **given, "PYTHONPATH": str(self.root / "build" / "links")}
        command = [sys.executable, "-P", "-m", f"tuneloop.{what}", "--config", str(self.settings)]
        return started(command, self.log(name), environment=environment)

    def log(self, name: str) -> Path:
        return self.settings.with_name(f"{name}.log")

    @contextmanager
    def explorer(self, port: int, engine: str) -> Iterator["subprocess.Popen[bytes]"]:
        """An explorer, ready; told to stop in the end, where it has not ended by then."""
        where = {"TUNELOOP__EXPLORER__PROXY_PORT": str(port)}
        where["TUNELOOP__EXPLORER__ROLLOUT_MODEL__ENGINE_URLS"] = f"[{engine}]"
        process = self.started("explorer", f"{port}", **where)

        def is_ready() -> bool:
            assert process.poll() is None, self.log(f"{port}").read_text()[-5000:]
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(is_ready, within_s=300)
            yield process
        finally:
            process.terminate()
            process.wait(90)

    @contextmanager
    def trainer(self, name: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A trainer, told to stop in the end, where it has not ended by then."""
        process = self.started("trainer", name)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(90)


@contextmanager
def haproxy(folder: Path, old: int, new: int) -> Iterator[str]:
    port, settings = free_port(), folder / "haproxy.conf"
    settings.write_text(_HAPROXY.format(port=port, old=old, new=new))
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            [program_of("haproxy"), "-db", "-f", str(settings)], stdout=log, stderr=log, env=environment()
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


#: Four services start meanwhile, on the same cores.
_THOUGHT_S = 0.1


@dataclass
class Load:
    """Clients that ask, stream, rate and commit again and again, and what they were answered."""

    url: str
    ids: list[str] = field(default_factory=list)
    streams: int = 0
    served: set[int] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def ask(self, http: httpx.Client) -> None:
        answer = http.post(CHAT, json=HELLO).raise_for_status()
        self._rate(http, answer, answer.json()["id"], reward=len(self.ids) % 2)

    def listen(self, http: httpx.Client) -> None:
        with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            answer.raise_for_status()
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        if events[-1] != "[DONE]":
            raise httpx.ReadError(f"a stream ended by {events[-1]}")
        self._rate(http, answer, json.loads(events[0])["id"], reward=1)
        self.streams += 1

    def commit(self, http: httpx.Client) -> None:
        """Commit, as often as is asked for: 503 says that replies are still on their way into the database."""
        answer = http.post("/commit", json={})
        if answer.status_code != 503:
            answer.raise_for_status()
        time.sleep(0.5)

    def _rate(self, http: httpx.Client, answer: httpx.Response, msg_id: str, *, reward: int) -> None:
        self.ids.append(msg_id)
        self.served.add(int(answer.headers["x-tuneloop-version"]))
        http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward}).raise_for_status()

    def _repeat(self, act: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self._ended.wait(_THOUGHT_S):
                try:
                    act(http)
                except httpx.HTTPStatusError as error:
                    self.failed.append(f"{act.__name__}: {error}: {error.response.text}")
                except httpx.HTTPError as error:
                    self.failed.append(f"{act.__name__}: {error!r}")

    @contextmanager
    def running(self) -> Iterator["Load"]:
        acts = [self.ask, self.ask, self.listen, self.listen, self.commit]
        self._threads = [threading.Thread(target=self._repeat, args=(act,)) for act in acts]
        for each in self._threads:
            each.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Let all end what they have begun."""
        self._ended.set()
        for each in self._threads:
            each.join()

    def goes_on(self) -> None:
        """Wait for some more replies, whole and streamed."""
        until, streams = len(self.ids) + 20, self.streams + 4
        eventually(lambda: len(self.ids) >= until and self.streams >= streams, within_s=120)


def revision(url: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute(f'SELECT version_num FROM "{SCHEMA}".alembic_version').fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.postgres
def test_no_request_fails_while_the_release_is_changed(
    checkout: Path, tmp_path: Path, postgres_url: str, schemas: Schemas
) -> None:
    settings = _settings(tmp_path, postgres_url)
    before, now = Release(checkout, settings), Release(ROOT, settings)
    old_port, new_port = free_port(), free_port()
    try:
        with (
            _engine() as first,
            _engine() as second,
            haproxy(tmp_path, old_port, new_port) as url,
            before.trainer("old-trainer") as old_trainer,
        ):
            load = Load(url)
            with before.explorer(old_port, first) as old:
                assert revision(postgres_url) == "0016"
                eventually(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
                with load.running():
                    load.goes_on()
                    _until_newer(load, trainer=old_trainer)
                    with now.explorer(new_port, second):
                        load.goes_on()
                        _until_newer(load, trainer=old_trainer)  # the old trainer's on the new schema, too
                        _all_arrive(list(load.ids), postgres_url)  # and what the old explorer recorded
                        figures = httpx.get(f"http://127.0.0.1:{old_port}/metrics").text
                        assert "tuneloop_database_up 1.0" in figures
                        assert "tuneloop_spool_quarantined_total 0.0" in figures
                        old.terminate()
                        assert old.wait(90) == 0
                        load.goes_on()
                        old_trainer.terminate()
                        assert old_trainer.wait(90) == 0
                        with now.trainer("new-trainer") as new_trainer:
                            # Before, what the old one published last might pass for its version.
                            eventually(lambda: "trainer_ready" in now.log("new-trainer").read_text(), within_s=300)
                            _until_newer(load, trainer=new_trainer)
                            load.goes_on()
                        assert new_trainer.returncode == 0
                        load.stop()
                        _all_arrive(list(load.ids), postgres_url)
            assert load.failed == []
            assert _imbalance(postgres_url) == []
            _refuses_a_newer_schema(before, postgres_url)
    finally:
        schemas.drop(SCHEMA)


def _settings(folder: Path, database: str) -> Path:
    """Of a tiny model that both releases serve, by an engine that each explorer is told of, and train."""
    experience_buffer = {"path": database, "name": SCHEMA}
    explorer = {"listen_address": "127.0.0.1", "service_status_check_interval": 0.5}
    buffer = {"train_batch_size": 8, "trainer_input": {"experience_buffer": experience_buffer}}
    config = write_settings(
        folder,
        make_model(folder / "model"),
        explorer=explorer | {"rollout_model": {"dtype": "float32"}},
        buffer=buffer,
    )
    values = yaml.safe_load(config.read_text())
    values["model"]["served_model_name"] = MODEL
    config.write_text(yaml.safe_dump(values))
    return config


@contextmanager
def _engine() -> Iterator[str]:
    """An engine that proves whatever it is given, and takes its time with each piece of a stream."""
    with engine_place() as place:
        double = place.fresh()
        double.answers_probes_by_manifest, double.piece_pause_s = True, 0.02
        yield place.url


def _until_newer(load: Load, *, trainer: "subprocess.Popen[bytes]") -> None:
    """Wait until users are answered by a version that is made from now on."""
    known = max(load.served)

    def is_newer() -> bool:
        assert trainer.poll() is None
        return max(load.served) >= known + 2  # one may have been on its way

    eventually(is_newer, within_s=300)


def _imbalance(url: str) -> list[str]:
    """What the ledger's equation finds wrong."""
    ledger = Ledger(connect(url, schema=SCHEMA))
    try:
        return list(ledger.reports.imbalance())
    finally:
        ledger.close()


def _refuses_a_newer_schema(release: Release, url: str) -> None:
    """As a release does that is started on the schema of a later one."""
    with psycopg.connect(url) as connection:
        connection.execute(f"UPDATE \"{SCHEMA}\".alembic_version SET version_num = '9999'")
    where = {"TUNELOOP__EXPLORER__ROLLOUT_MODEL__ENGINE_URLS": "[http://127.0.0.1:9]"}
    assert release.started("explorer", "refused", **where).wait(300) == 3
    assert "is not of this release of tuneloop" in release.log("refused").read_text()


def _all_arrive(ids: list[str], url: str) -> None:
    """Wait until all of these replies are in the database, each once."""

    def missing() -> set[str]:
        with psycopg.connect(url) as connection:
            rows = connection.execute(f'SELECT msg_id FROM "{SCHEMA}".exchanges').fetchall()
        found = [row[0] for row in rows]
        assert len(found) == len(set(found))
        return set(ids) - set(found)

    eventually(lambda: not missing())
