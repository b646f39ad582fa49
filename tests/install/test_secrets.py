"""Planted secrets: none is in an output, a log, an error, a repr or a command line that other users can read."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.doubles.engine import CHAT, MODEL, EngineDouble
from tests.doubles.serving import serving
from tests.doubles.warm.commands import run_tuneloop
from tests.explorer.running import HELLO, eventually
from tests.explorer.test_main import write_settings
from tests.loop.harness.services import descendants, free_port
from tuneloop.shared.settings.loader import load_settings, read_settings

SECRETS = {
    "explorer.admin_key": "planted-admin-key-1",
    "explorer.rollout_model.engine_key": "planted-engine-key-2",
    "judge.key": "planted-judge-key-3",
    "algorithm.distill.teacher_key": "planted-teacher-key-4",
    "buffer.trainer_input.experience_buffer.path": "postgresql://u:planted-password-5@127.0.0.1:9/none",
}
FLAGS = [word for key, value in SECRETS.items() for word in ("--set", f"{key}={value}")]
TUNELOOP = [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()"]


def run(*arguments: str) -> str:
    """All that a command prints."""
    ended = run_tuneloop(*arguments)
    return ended.output + ended.errors


def test_settings_show_none(tmp_path: Path) -> None:
    file = write_settings(tmp_path)
    settings = load_settings(file, [f"{key}={value}" for key, value in SECRETS.items()])
    shown = [
        repr(settings),
        str(settings),
        str(settings.model_dump()),
        settings.model_dump_json(),
        repr(vars(settings)),
    ]
    assert [each for each in shown if "planted" in each] == []
    report = read_settings(file, [*(f"{key}={value}" for key, value in SECRETS.items()), "explorer.proxy_prot=1"])
    assert report.problems
    assert "planted" not in f"{report} {report.problems} {report.warning}"


@pytest.mark.parametrize("wrong", [(), ("--set", "trainer.seed=x"), ("--set", "explorer.admin_kye=planted-typo-6")])
def test_commands_print_none(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    file = str(write_settings(tmp_path))
    for command in (["validate", file], ["config", "show", "-c", file], ["run", "-c", file], ["doctor", "-c", file]):
        assert "planted" not in run(*command, *FLAGS, *wrong), command


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_that_is_refused_is_not_quoted(tmp_path: Path, key: str) -> None:
    assert "planted" not in run("validate", str(write_settings(tmp_path)), "--set", f"{key}=[planted, planted]")
    assert "planted" not in run("validate", str(write_settings(tmp_path)), "--set", f"{key}={{planted: 1}}")


def test_a_running_service_shows_none(tmp_path: Path) -> None:
    """Neither in the command lines of all its processes, nor in what it logs of wrong keys and an absent judge."""
    double = EngineDouble()
    kept = {key: value for key, value in SECRETS.items() if "experience_buffer" not in key}
    log = tmp_path / "log"
    with serving(double) as url, log.open("wb") as output:
        file = write_settings(tmp_path, explorer__rollout_model__engine_urls=[url], explorer__proxy_port=free_port())
        flags = [word for key, value in kept.items() for word in ("--set", f"{key}={value}")]
        judge = ["--set", "judge.url=http://127.0.0.1:9/v1", "--set", "judge.model=j"]
        service = subprocess.Popen([*TUNELOOP, "run", "-c", str(file), *flags, *judge], stdout=output, stderr=output)
        address = f"http://127.0.0.1:{load_settings(file).explorer.proxy_port}"
        try:
            eventually(lambda: _ready(address), within_s=120)
            with httpx.Client(base_url=address, timeout=60) as http:
                assert http.post(CHAT, json=HELLO).status_code == 200
                answers = [
                    http.get("/admin/versions", headers={"authorization": "Bearer wrong"}),
                    http.get("/admin/versions", headers={"authorization": f"Bearer {SECRETS['explorer.admin_key']}"}),
                    http.get("/metrics"),
                    http.post(CHAT, json={"model": MODEL, "messages": 3}),
                ]
            assert [each.status_code for each in answers[:3]] == [401, 200, 200]
            lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in [service.pid, *descendants(service.pid)]]
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(60) == 0, log.read_text()
    assert len(lines) >= 2  # the control process and a worker
    assert [each for each in lines if "planted" in each] == []
    assert "planted" not in "".join(each.text + str(each.headers) for each in answers)
    assert "planted" not in log.read_text()
    below = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert [each for each in below if b"planted" in each.read_bytes()] == []


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
