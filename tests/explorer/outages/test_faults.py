"""What disks, limits, names and clocks do to a service: nothing acknowledged is lost, and part and cure are told."""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest

from tests.constants import section_of
from tests.doubles import postgres
from tests.doubles.engine import CHAT, EngineDouble
from tests.doubles.judge import judge_place
from tests.explorer.outages.test_backup_under_load import publish, rewards, version
from tests.explorer.outages.test_missing_database import _alarm, chat
from tests.explorer.outages.test_stops import alarms, asking, diagnosed, ready
from tests.explorer.outages.test_stops import hurried as hurried
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.test_main import attached_to, job, service, stored, write_settings
from tests.loop.harness.services import descendants, free_port
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.operations import diagnosis
from tuneloop.shared.operations.doctor import as_sections, examine_experiment
from tuneloop.shared.settings.feedback import JudgeSettings
from tuneloop.shared.settings.loader import load_settings

pytestmark = pytest.mark.xdist_group("workers")

ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root may mount")


def told(settings: Path, section: str = "Diagnosis") -> str:
    """What doctor says."""
    chosen = load_settings(settings)
    return "\n".join(as_sections(examine_experiment(chosen), chosen)[section])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of few inodes."""
    found = tmp_path / "disk"
    found.mkdir()
    options = "size=64m,nr_inodes=60"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(found)], check=False).returncode:
        pytest.skip("no mounts here")
    yield found
    subprocess.run(["umount", "-l", str(found)], check=True)


def fill_inodes(disk: Path) -> None:
    with suppress(OSError):
        for number in range(100):
            (disk / f"hog-{number}").touch()


def free_inodes(disk: Path) -> None:
    for path in disk.glob("hog-*"):
        path.unlink()


def remount(how: str) -> Callable[[Path], None]:
    def remounted(disk: Path) -> None:
        # It is busy for as long as a file there is open for writing: on a small disk that is not long.
        eventually(lambda: not subprocess.run(["mount", "-o", f"remount,{how}", disk], check=False).returncode)

    return remounted


@ONLY_ROOT
@pytest.mark.parametrize(
    ("harm", "cure", "words"),
    [
        (fill_inodes, free_inodes, "No space left on device: make room: see `df` and `df -i`"),
        (remount("ro"), remount("rw"), "Read-only file system: see `dmesg` and the disk's mount"),
    ],
)
def test_an_outbox_without_inodes_or_rights_refuses_and_tells_the_cure(
    tmp_path: Path,
    double: EngineDouble,
    disk: Path,
    harm: Callable[[Path], None],
    cure: Callable[[Path], None],
    words: str,
) -> None:
    settings = write_settings(
        tmp_path,
        explorer__outbox_dir=str(disk / "outbox"),
        explorer__proxy_port=free_port(),
        explorer__service_status_check_interval=0.1,
        **attached_to(double),
    )
    with service(settings) as (_, http):
        said, refusals = chat(http, 3), []

        def is_refused() -> bool:
            harm(disk)
            reply = http.post(CHAT, json=HELLO)
            if reply.status_code == 200:
                said.append(reply.json()["id"])
            else:
                refusals.append((reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]))
            return http.get("/health/ready").status_code == 503

        eventually(is_refused)
        assert words in http.get("/health/ready").json()["reason"]
        assert "not_ready: the explorer at" in told(settings)
        assert words in told(settings)
        cure(disk)
        eventually(lambda: http.get("/health/ready").status_code == 200)
        assert set(refusals) <= {(503, "storage_full", "5")}
        said += chat(http, 3)
        eventually(lambda: sum(stored(tmp_path).values()) == len(said))
    assert {msg_id for msg_id, _ in rewards(settings)} == set(said)


def test_a_service_that_can_open_no_more_files_is_told_and_goes_on(tmp_path: Path, double: EngineDouble) -> None:
    port = free_port()
    settings = write_settings(
        tmp_path, explorer__proxy_port=port, explorer__service_status_check_interval=0.1, **attached_to(double)
    )
    with service(settings) as (running, http):
        said, limits = chat(http, 3), {}
        for pid in (running.pid, *descendants(running.pid)):
            limits[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir(f"/proc/{pid}/fd")))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 8, limits[pid][1]))
        eventually(lambda: http.get("/health/ready").status_code == 503)
        assert "raise its limit (`LimitNOFILE=` of systemd" in http.get("/health/ready").json()["reason"]
        eventually(lambda: "(`LimitNOFILE=`" in told(settings))
        eventually(lambda: _alarm(http, "open_files"))
        with suppress(OSError, httpx.HTTPError):
            crowd = [httpx.Client(base_url=http.base_url, timeout=10) for _ in range(20)]
            for each in crowd:
                each.get("/health/live")
        assert "LimitNOFILE=" in told(settings)  # though it answers no new connection
        for each in crowd:
            each.close()
        for pid, limit in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    with service(settings) as (_, http):
        said += chat(http, 3)
        eventually(lambda: set(said) <= {msg_id for msg_id, _ in rewards(settings)})
        eventually(lambda: not _alarm(http, "open_files"))


def test_a_judge_that_takes_questions_and_answers_none_is_told(
    tmp_path: Path, double: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "JUDGE_S", 3.0)
    with judge_place() as judge:
        judge.pause_s = 3600.0
        by = section_of(JudgeSettings, {"url": judge.base_url, "model": "m", "retries": 0, "timeout": 8.0})
        with explorer_running(settings_for(tmp_path, [double.url]).model_copy(update={"judge": by})) as explorer:
            msg_id = explorer.chat().json()["id"]
            eventually(lambda: "judge_silent" in alarms(explorer))
            assert "start the model behind judge.url" in alarms(explorer)["judge_silent"]
            eventually(lambda: "judge_silent: the judge has given no verdict" in diagnosed(explorer))
            assert ready(explorer) == (200, "")
            judge.pause_s = 0.0
            eventually(lambda: "judge_silent" not in alarms(explorer))
            eventually(lambda: msg_id in {each.msg_id for each in explorer.feedbacks()})


@pytest.mark.usefixtures("hurried")
def test_an_engine_that_new_connections_do_not_reach_is_told(explorer: RunningExplorer) -> None:
    """As where DNS hangs, or tells another address: the control process keeps the connection that it has."""
    engine = explorer.services.fleet.engines[0].http
    with socket.socket() as unanswered, ExitStack() as stack:
        unanswered.bind(("127.0.0.1", 0))
        unanswered.listen(0)
        for _ in range(3):  # its queue is full: who comes now is not answered
            each = stack.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(unanswered.getsockname())
        port, engine._port = engine._port, unanswered.getsockname()[1]
        while engine._idle:
            engine._idle.pop().abort()
        with asking(explorer):
            eventually(lambda: ready(explorer)[0] == 503)
            assert "see that its host is reached, by the name in DNS" in ready(explorer)[1]
            eventually(lambda: "engine_stuck: engine 0 has requests" in diagnosed(explorer))
        refusal = explorer.chat()
        assert refusal.status_code == 502
        assert "no connection within 10 s: see its host" in refusal.json()["error"]["message"]
        engine._port = port
    assert explorer.chat().status_code == 200
    eventually(lambda: ready(explorer)[0] == 200)


def test_a_file_of_the_served_version_that_is_deleted_is_told_before_an_engine_needs_it(
    tmp_path: Path, double: EngineDouble
) -> None:
    settings = write_settings(tmp_path, explorer__service_status_check_interval=0.1, **attached_to(double))
    with service(settings) as (_, http):
        publish(settings)
        eventually(lambda: version(http) == 1)
        assert "no engine that starts can load it" not in told(settings, "Versions")
        [file] = (job(tmp_path) / "global_step_1").rglob("*.safetensors")
        data = file.read_bytes()
        file.unlink()
        assert "version 1 (champion): " in told(settings, "Versions")
        assert f"{file.name}'" in told(settings, "Versions")
        assert "`tuneloop versions promote` another version" in told(settings, "Versions")
        assert version(http) == 1
        file.write_bytes(data[:-1])
        assert f"{file.name} is cut: no engine that starts can load it" in told(settings, "Versions")
        file.write_bytes(data)
        assert "no engine that starts can load it" not in told(settings, "Versions")


@pytest.mark.postgres
def test_postgres_alone_put_back_to_yesterday_is_told_and_gets_back_what_the_outbox_has(
    tmp_path: Path, double: EngineDouble
) -> None:
    with closing(postgres.started()) as server:
        settings = write_settings(
            tmp_path,
            explorer__proxy_port=free_port(),
            explorer__service_status_check_interval=0.1,
            buffer__trainer_input__experience_buffer={"path": server.url},
            **attached_to(double),
        )
        with service(settings) as (_, http):
            said, data, copy = chat(http, 5), server.program.folder, tmp_path / "yesterday"
            server.stop()
            subprocess.run(["cp", "-a", data, copy], check=True)
            server.start()
            eventually(lambda: http.post("/commit").status_code == 200)
            publish(settings)
            eventually(lambda: version(http) == 1)
            said += chat(http, 5)
            server.stop()
            shutil.rmtree(data)
            subprocess.run(["cp", "-a", copy, data], check=True)
            server.start()
            eventually(lambda: set(said) <= {msg_id for msg_id, reward in rewards(settings) if reward is not None})
            assert "the database is older than" in told(settings, "Ledger")
            assert "`tuneloop restore`) or go on with it as it is (`tuneloop db adopt`)" in told(settings, "Ledger")
            with closing(Ledger.of(load_settings(settings))) as ledger:
                assert ledger.reports.audit() == []
