"""An upgrade in the order of docs/deployment.md, under load: an earlier release by its checkout, HAProxy in front."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.databases import Schemas
from tests.deploy.prometheus import ROOT
from tests.doubles.engine import CHAT, engine_place
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import write_settings
from tests.hostile.fronts import environment, program_of
from tests.loop.harness.services import free_port

#: The newest commit with the database's schema of two steps ago (0008): keys, but no raters and nothing for the page.
BEFORE = "0fc747c"

SCHEMA = "upgrade"

_HAPROXY = """
defaults
  mode http
  option redispatch
  retries 3
  timeout connect 2s
  timeout client 60s
  timeout server 60s
frontend users
  bind 127.0.0.1:{port}
  default_backend explorers
backend explorers
  option httpchk GET /health/ready
  default-server check inter 200ms fall 1 rise 1 on-marked-down shutdown-sessions
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


@contextmanager
def explorer_of(release: Path, settings: Path, port: int, engine: str) -> Iterator["subprocess.Popen[bytes]"]:
    """An explorer of a release, ready; told to stop in the end, where it has not ended by then."""
    given = {"TUNELOOP__EXPLORER__PROXY_PORT": str(port), "PYTHONPATH": str(release / "build" / "links")}
    given["TUNELOOP__EXPLORER__ROLLOUT_MODEL__ENGINE_URLS"] = f"[{engine}]"
    log = settings.with_name(f"{port}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tuneloop.explorer", "--config", str(settings)],
            env={**os.environ, **given},
            stdout=output,
            stderr=output,
        )

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
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


@dataclass
class Load:
    """Clients that ask and rate without a pause, and what they were answered."""

    url: str
    ids: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.ended.is_set():
                try:
                    answer = http.post(CHAT, json=HELLO)
                    answer.raise_for_status()
                    self.ids.append(answer.json()["id"])
                    http.post("/feedback", json={"msg_ids": [self.ids[-1]], "reward": 1}).raise_for_status()
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                time.sleep(0.02)

    @contextmanager
    def running(self, clients: int) -> Iterator["Load"]:
        threads = [threading.Thread(target=self.ask) for _ in range(clients)]
        for each in threads:
            each.start()
        try:
            yield self
        finally:
            self.ended.set()
            for each in threads:
                each.join()

    def goes_on(self) -> None:
        """Wait for some more replies."""
        until = len(self.ids) + 20
        eventually(lambda: len(self.ids) >= until)


def revision(url: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute(f'SELECT version_num FROM "{SCHEMA}".alembic_version').fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.postgres
def test_no_request_fails_while_the_release_is_changed(
    checkout: Path, tmp_path: Path, postgres_url: str, schemas: Schemas
) -> None:
    settings = write_settings(
        tmp_path,
        buffer__trainer_input__experience_buffer__path=postgres_url,
        buffer__trainer_input__experience_buffer__name=SCHEMA,
        explorer__service_status_check_interval=0.5,
    )
    old_port, new_port = free_port(), free_port()
    try:
        with engine_place() as first, engine_place() as second, haproxy(tmp_path, old_port, new_port) as url:
            load = Load(url)
            with explorer_of(checkout, settings, old_port, first.fresh().url) as old:
                before = revision(postgres_url)
                eventually(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
                with load.running(2):
                    load.goes_on()
                    with explorer_of(ROOT, settings, new_port, second.fresh().url):
                        assert before == "0008" != revision(postgres_url)
                        load.goes_on()
                        _all_arrive(list(load.ids), postgres_url)  # from the old release on the new schema, too
                        figures = httpx.get(f"http://127.0.0.1:{old_port}/metrics").text
                        assert "tuneloop_database_up 1.0" in figures
                        assert "tuneloop_spool_quarantined_total 0.0" in figures
                        old.terminate()
                        assert old.wait(90) == 0
                        load.goes_on()
                        load.ended.set()
                        _all_arrive(list(load.ids), postgres_url)
            assert load.failed == []
            _refuses_a_newer_schema(checkout, settings)
    finally:
        schemas.drop(SCHEMA)


def _refuses_a_newer_schema(release: Path, settings: Path) -> None:
    """As a release does that is started on the schema of a later one."""
    command = [sys.executable, "-P", "-m", "tuneloop.explorer", "--config", str(settings)]
    given = {**os.environ, "PYTHONPATH": str(release / "build" / "links")}
    given["TUNELOOP__EXPLORER__ROLLOUT_MODEL__ENGINE_URLS"] = "[http://127.0.0.1:9]"
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3
    assert "is not of this release of tuneloop" in done.stderr


def _all_arrive(ids: list[str], url: str) -> None:
    """Wait until all of these replies are in the database, each once."""

    def missing() -> set[str]:
        with psycopg.connect(url) as connection:
            rows = connection.execute(f'SELECT msg_id FROM "{SCHEMA}".exchanges').fetchall()
        found = [row[0] for row in rows]
        assert len(found) == len(set(found))
        return set(ids) - set(found)

    eventually(lambda: not missing())
