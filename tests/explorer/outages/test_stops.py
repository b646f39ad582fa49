"""Each way in which a part stands still: an alarm or `/health/ready` tells it, and `doctor` names part and cure.

The seconds of the rules are shortened here; their own are within a minute.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from tests.conftest import Place
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.full_pipe import full_pipe
from tests.doubles.warm.process import WarmProcess
from tests.explorer.checkpoints import register
from tests.explorer.outages.test_missing_database import _alarm
from tests.explorer.running import HELLO, MoodyLedger, RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.test_main import attached_to, service, write_settings
from tests.loop.harness.services import free_port
from tuneloop.explorer.engines import movement
from tuneloop.explorer.versions import loading
from tuneloop.explorer.versions.loading import Verifier, VerifierProcess, verify_wanted
from tuneloop.runner.outbox import Outbox
from tuneloop.shared.errors import CheckpointUnreadable
from tuneloop.shared.ledger import facts
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.operations import diagnosis
from tuneloop.shared.operations.doctor import as_sections, examine_experiment
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.xdist_group("workers")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands still is told soon."""
    monkeypatch.setattr(diagnosis, "STILL_S", 3.0)
    monkeypatch.setattr(diagnosis, "APPEND_S", 2.0)
    monkeypatch.setattr(movement, "_ASK_S", 1.0)


def ready(explorer: RunningExplorer) -> tuple[int, str]:
    answer = explorer.http.get("/health/ready")
    return answer.status_code, answer.json()["reason"] or ""


def alarms(explorer: RunningExplorer) -> dict[str, str]:
    return {each.name: each.reason for each in explorer.ledger.alarms.all()}


def diagnosed(explorer: RunningExplorer) -> str:
    """What doctor says of the explorer."""
    host, port = explorer.url.removeprefix("http://").split(":")
    chosen = explorer.settings.explorer.model_copy(update={"listen_address": host, "proxy_port": int(port)})
    settings = explorer.settings.model_copy(update={"explorer": chosen})
    return "\n".join(as_sections(examine_experiment(settings), settings)["Diagnosis"])


@contextmanager
def asking(explorer: RunningExplorer) -> Iterator[None]:
    """A request that waits for its reply."""

    def ask() -> None:
        with suppress(httpx.HTTPError):
            explorer.http.post(CHAT, json=HELLO, timeout=120)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask)
        yield


@pytest.mark.usefixtures("hurried")
def test_an_engine_that_says_it_is_healthy_and_never_ends_a_reply_is_told(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    double.hangs = True
    with asking(explorer):
        eventually(lambda: ready(explorer)[0] == 503)
        assert "engine 0 has requests, and has made no step nor sent a byte" in ready(explorer)[1]
        eventually(lambda: "engine_stuck" in alarms(explorer))
        assert "engine_stuck: engine 0 has requests" in diagnosed(explorer)
        assert "start it again" in diagnosed(explorer)
        assert _alarm(explorer.http, "engine_stuck")
        reasons = {each["code"] for each in explorer.http.get("/training").json()["reasons"]}
        assert "engine_stuck" in reasons
        double.hangs = False
        eventually(lambda: ready(explorer)[0] == 200)
    eventually(lambda: "engine_stuck" not in alarms(explorer))
    assert explorer.chat().status_code == 200
    eventually(lambda: time.time() - explorer.metrics()["tuneloop_last_reply_timestamp_seconds"] < 30)


@pytest.mark.usefixtures("hurried")
def test_an_engine_whose_counters_move_is_busy(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.hangs = double.steps_while_it_hangs = True
    with asking(explorer):
        time.sleep(8)
        assert ready(explorer) == (200, "")
        assert alarms(explorer) == {}
        double.steps_while_it_hangs = False
        eventually(lambda: ready(explorer)[0] == 503)
        double.hangs = False


@pytest.mark.usefixtures("hurried")
def test_an_engine_whose_load_never_ends_is_told(explorer: RunningExplorer, double: EngineDouble) -> None:
    double.load_s = 3600.0
    register(explorer.ledger, explorer.settings.job_dir)
    eventually(lambda: "engine_stuck" in alarms(explorer))
    assert "engine 0 has been loading weights for" in alarms(explorer)["engine_stuck"]
    eventually(lambda: ready(explorer)[0] == 503)
    assert "engine 0 has been loading weights" in ready(explorer)[1]
    assert "engine_stuck: engine 0 has been loading weights" in diagnosed(explorer)


@pytest.mark.usefixtures("hurried")
def test_a_disk_that_takes_no_record_is_told(explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch) -> None:
    thaws, append = threading.Event(), Outbox.append

    def wait(outbox: Outbox, payloads: list[bytes]) -> None:
        thaws.wait()
        append(outbox, payloads)

    monkeypatch.setattr(Outbox, "append", wait)
    with asking(explorer):
        eventually(lambda: ready(explorer)[0] == 503)
        assert "the disk of explorer.outbox_dir has not taken a record" in ready(explorer)[1]
        eventually(lambda: "outbox_stuck" in alarms(explorer))
        assert "outbox_stuck: the disk of explorer.outbox_dir" in diagnosed(explorer)
        thaws.set()
        eventually(lambda: ready(explorer)[0] == 200)


#: Takes SQLite's lock, and stops.
_LOCKS = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
os.kill(os.getpid(), signal.SIGSTOP)
"""


def until_told(explorer: RunningExplorer) -> None:
    """Wait until it is told that the database stands still; requests are answered."""
    eventually(lambda: _alarm(explorer.http, "database_silent"))
    assert explorer.metrics()["tuneloop_database_up"] == 0
    assert ready(explorer) == (200, "")
    assert explorer.chat().status_code == 200
    eventually(lambda: bool(explorer.http.get("/health/ready").json()["stops"]))
    [stop] = explorer.http.get("/health/ready").json()["stops"]
    assert stop["code"] == "database_silent"
    assert "a connection to it is half open, or a stopped process holds its lock" in stop["sentence"]


@pytest.mark.usefixtures("hurried")
def test_a_stopped_process_that_holds_sqlites_lock_is_told(explorer: RunningExplorer) -> None:
    path = f"{explorer.settings.job_dir}/ledger.db"
    with subprocess.Popen([sys.executable, "-c", _LOCKS, path]) as holding:
        try:
            eventually(lambda: "State:\tT" in Path(f"/proc/{holding.pid}/status").read_text())
            explorer.chat()
            until_told(explorer)
            assert "database_silent: the database has said nothing" in diagnosed(explorer)
        finally:
            holding.kill()
    eventually(lambda: not _alarm(explorer.http, "database_silent"))
    explorer.until_flushed()


class FreezingWire:
    """Passes on what goes to and from a server's socket, until it is told to freeze; then nothing, and nothing ends."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder, self._server, self.flows = folder, server, threading.Event()
        self.flows.set()
        self._open: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/.s.PGSQL.5432")
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ours, theirs = self._listening.accept()[0], socket.socket(socket.AF_UNIX)
            theirs.connect(self._server)
            self._open += [ours, theirs]
            for ends in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.flows.wait()
                other.sendall(data)

    def cut(self) -> None:
        """End all connections, as who has noticed does."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.flows.set()


@pytest.mark.postgres
@pytest.mark.usefixtures("hurried")
def test_a_connection_to_the_database_that_is_half_open_is_told(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, double: EngineDouble, postgres_place: Place
) -> None:
    url = make_url(postgres_place.url)
    folder = Path("/tmp") / f"tl-wire-{os.getpid()}"  # a socket's path is short
    folder.mkdir()
    try:
        wire = FreezingWire(folder, f"{url.query['host']}/.s.PGSQL.5432")
        there = url.update_query_dict({"host": str(folder)}).render_as_string(hide_password=False)
        database.upgrade(postgres_place.url, schema=postgres_place.schema)
        settings = settings_for(tmp_path, [double.url])
        ledger = MoodyLedger(database.connect(there, schema=postgres_place.schema), rule=settings.reward)
        ledger.versions.ensure_base(settings.model.model_path.absolute())
        with explorer_running(settings, ledger) as explorer:
            wire.flows.clear()
            try:
                explorer.chat()
                until_told(explorer)
            finally:
                wire.cut()
            eventually(lambda: not _alarm(explorer.http, "database_silent"))
            explorer.until_flushed()
    finally:
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()


def test_a_trainer_that_was_not_seen_any_more_is_an_alarm_until_it_is_seen(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped sends no heartbeat (tests/trainer/test_heartbeat.py has one that beats and stands still)."""
    epoch = explorer.ledger.training.take_epoch("host:1")
    time.sleep(1)
    assert alarms(explorer) == {}
    monkeypatch.setattr(facts, "TRAINER_SEEN_S", 0.5)
    eventually(lambda: "trainer_silent" in alarms(explorer))
    assert "trainer host:1 was last seen" in alarms(explorer)["trainer_silent"]
    [reason] = [each for each in explorer.http.get("/training").json()["reasons"] if each["code"] == "no_trainer"]
    assert "look at its log, start it again" in reason["sentence"]
    explorer.ledger.training.end(epoch)
    eventually(lambda: alarms(explorer) == {})


async def test_a_verifier_that_is_stopped_is_killed_and_told(
    explorer: RunningExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explorer's own takes up the version meanwhile: this one is of another explorer."""

    async def start(*arguments: str) -> VerifierProcess:
        process.arguments = arguments
        return process

    register(explorer.ledger, explorer.settings.job_dir)
    version = explorer.ledger.versions.all()[1]
    verifier = Verifier.of(explorer.settings)._replace(job_dir=explorer.settings.job_dir)
    monkeypatch.setattr(loading, "_STILL_S", 2.0)
    eventually(lambda: explorer.version() == 1)
    process = VerifierProcess()
    monkeypatch.setattr(loading, "start_verifier", start)
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(CheckpointUnreadable, match="its verifier stood still for 2 s, and was killed"):
        await verify_wanted(version, verifier, explorer.ledger)
    assert process.returncode == -signal.SIGKILL
    cleared = [each for each in explorer.ledger.alarms.all(cleared=True) if each.name == "version_unreadable"]
    assert "stood still for 2 s" in cleared[0].reason


def test_an_explorer_whose_log_nobody_reads_serves_and_counts_what_it_drops(
    tmp_path: Path, double: EngineDouble
) -> None:
    port = free_port()
    settings = write_settings(tmp_path, explorer__proxy_port=port, **attached_to(double))
    command = [sys.executable, "-m", "tuneloop.explorer", "--config", str(settings)]
    with full_pipe() as log, WarmProcess(command, stderr=log) as running:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

                def is_ready() -> bool:
                    with suppress(httpx.TransportError):
                        return http.get("/health/ready").status_code == 200
                    return False

                eventually(is_ready)
                said = http.post(CHAT, json=HELLO).json()["id"]
                assert http.post("/feedback", json={"msg_ids": [said], "reward": 1}).json()["counts"]["accepted"] == 1
                assert "tuneloop_log_lines_dropped_total 0.0" in http.get("/metrics").text
                running.terminate()
                assert running.wait(60) == 0
        finally:
            running.kill()


def test_a_control_process_that_is_stopped_is_told_by_its_workers(tmp_path: Path, double: EngineDouble) -> None:
    port = free_port()
    settings = write_settings(tmp_path, explorer__proxy_port=port, **attached_to(double))
    with service(settings) as (running, http):
        running.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: http.get("/health/ready").status_code == 503, within_s=60)
            assert "the control process has said nothing" in http.get("/health/ready").json()["reason"]
            chosen = load_settings(settings)
            told = as_sections(examine_experiment(chosen), chosen)["Diagnosis"]
            assert any("control_silent" in each and "Start the explorer again" in each for each in told)
            assert http.post(CHAT, json=HELLO).status_code == 200
        finally:
            running.send_signal(signal.SIGCONT)
        eventually(lambda: http.get("/health/ready").status_code == 200)


def test_an_explorer_that_takes_connections_and_does_not_answer_is_told(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = settings_for(tmp_path, proxy_port=silent.getsockname()[1])
        told = as_sections(examine_experiment(settings), settings)["Diagnosis"]
    assert "takes connections and does not answer: end its processes" in told[0]
