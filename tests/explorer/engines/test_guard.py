import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.explorer.running import eventually, settings_for
from tuneloop.explorer.engines import guard, process
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.shared.errors import EnvironmentRefused

#: A command with a grandchild; both write down who they are, and ignore what argv tells them to.
FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" not in sys.argv:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[1:], "child"])
with open(sys.argv[2], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""

#: An owner: starts a guard with a pipe, says its number and waits to be killed.
OWNER = """
import subprocess, sys, time
command = [sys.executable, "-m", "tuneloop.explorer.engines.guard", *sys.argv[1:]]
guard = subprocess.Popen(command, stdin=subprocess.PIPE)
print(guard.pid, flush=True)
time.sleep(60)
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def family(place: Path, *how: str) -> list[str]:
    return [sys.executable, "-c", FAMILY, FAMILY, str(place), *how]


def pids(place: Path) -> list[int]:
    eventually(lambda: place.exists() and place.read_text().count("\n") == 2)
    return [int(line) for line in place.read_text().split()]


def guarded(*command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tuneloop.explorer.engines.guard", *command], stdin=subprocess.PIPE)


@pytest.mark.parametrize(("how", "within_s"), [((), guard.GRACE_S), (("stubborn",), 60.0)])
def test_a_command_dies_with_its_owner(tmp_path: Path, how: tuple[str, ...], within_s: float) -> None:
    command = [sys.executable, "-c", OWNER, *family(tmp_path / "pids", *how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        all_of_them = [int(owner.stdout.readline()), *pids(tmp_path / "pids")]
        assert all(map(lives, all_of_them))
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: not any(map(lives, all_of_them)), within_s)


def test_a_command_dies_when_its_owner_closes_the_pipe_or_ends_the_guard(tmp_path: Path) -> None:
    for number, end in enumerate([lambda guard: guard.stdin.close(), lambda guard: guard.terminate()]):
        place = tmp_path / str(number)
        with guarded(*family(place)) as running:
            all_of_them = pids(place)
            end(running)
            assert running.wait(60) == 128 + signal.SIGTERM
        eventually(lambda all_of_them=all_of_them: not any(map(lives, all_of_them)))


def test_all_of_a_command_dies_when_the_owners_child_is_killed(tmp_path: Path) -> None:
    with guarded(*family(tmp_path / "pids")) as running:
        all_of_them = pids(tmp_path / "pids")
        running.kill()
    eventually(lambda: not any(map(lives, all_of_them)))


@pytest.mark.parametrize("code", [0, 1, 3, 77])
def test_the_exit_code_is_passed_on(code: int) -> None:
    with guarded(sys.executable, "-c", f"raise SystemExit({code})") as running:
        assert running.wait(60) == code


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    script = "import subprocess, sys; open(sys.argv[1], 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    with guarded(sys.executable, "-c", script, str(place)) as running:
        started = time.monotonic()
        assert running.wait(60) == 0
    assert not lives(int(place.read_text()))
    assert time.monotonic() - started < guard.GRACE_S


class NeverHealthy:
    """The control of an engine that does not answer."""

    async def healthy(self) -> bool:
        return False


async def test_an_engine_that_is_starting_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "INFO core.py Initializing\nINFO cpu_model_runner.py Starting to load model /m...\nINFO took 3 s"
    command = [sys.executable, "-c", f"import time; print({log!r}, flush=True); time.sleep(60)"]
    monkeypatch.setattr(process, "_SAY_EVERY_S", 0.5)
    monkeypatch.setattr(process.EngineProcess, "command", lambda self, model: (command, dict(os.environ)))
    settings = settings_for(tmp_path, [])
    rollout = settings.explorer.rollout_model.model_copy(update={"startup_timeout": 5.0})
    settings = settings.model_copy(update={"explorer": settings.explorer.model_copy(update={"rollout_model": rollout})})
    engine = Engine(0, EngineHttp(), cast("Any", NeverHealthy()))
    with capture_logs() as logs, pytest.raises(EnvironmentRefused, match="engine 0 was not ready within 5 s"):
        await process.EngineProcess(settings, engine, socket=tmp_path / "socket").start(tmp_path)
    said = [(each["engine"], each["stage"]) for each in logs if each["event"] == "engine_start_goes_on"]
    assert len(said) >= 2
    assert said[-1] == (0, "loading weights")
