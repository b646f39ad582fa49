"""What is ordered of a Ray cluster, and the tunnel that carries an engine's socket from another machine."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.explorer.running import eventually, settings_for
from tuneloop.explorer.engines import guard, process
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.engines.ray_engine import (
    SPEC_VARIABLE,
    EngineActor,
    RayEngineSpec,
    open_local_end,
    open_remote_end,
)
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.settings import Settings

SECRET = b"s" * 32


def test_an_engine_elsewhere_gets_the_gpus_that_ray_chooses(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "mode": "serve",
            "checkpoint_root_dir": tmp_path,
            "model": {"model_path": "m"},
            "cluster": {"node_num": 2, "gpu_per_node": 2, "ray_address": "head:6379"},
            "explorer": {"rollout_model": {"engine_num": 2, "tensor_parallel_size": 2}},
        }
    )
    socket = tmp_path / "1.sock"
    command, environment = EngineProcess(settings, Engine(1, EngineHttp()), socket=socket).command(Path("weights"))
    order = msgspec.json.decode(environment[SPEC_VARIABLE], type=RayEngineSpec)
    assert command[-1] == "tuneloop.explorer.engines.ray_engine"
    assert (order.ray_address, order.gpus, order.umask) == ("head:6379", 2, 0o077)
    assert "CUDA_VISIBLE_DEVICES" not in order.environment
    assert order.environment["VLLM_SERVER_DEV_MODE"] == "1"
    # Its own processes stay among themselves: they ask for no key, and every machine of the cluster could reach them.
    assert order.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert order.environment["GLOO_SOCKET_IFNAME"] == order.environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert order.command.count(str(socket)) == order.command.count("weights") == 1


def test_an_engine_elsewhere_writes_for_its_owner_alone_and_no_core_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
    limited: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: limited.append((what, limits)))
    log = tmp_path / "log" / "engine.log"
    spec = RayEngineSpec(
        ray_address="",
        insecure=True,
        gpus=0,
        socket=str(tmp_path / "engine.sock"),
        log=str(log),
        command=["python", "-c", "import os; print(oct(os.umask(0)))"],
        environment={},
        umask=0o077,
    )
    before = os.umask(0o022)
    try:
        actor = EngineActor()
        actor.start(msgspec.json.encode(spec), b"secret")
        assert actor.wait() == 0
        assert actor._process.stdin is not None
        actor._process.stdin.close()
    finally:
        os.umask(before)
    assert (log.parent.stat().st_mode & 0o777, log.stat().st_mode & 0o777) == (0o700, 0o600)
    assert log.read_text() == "0o77\n"
    assert limited == [(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))]


async def _engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says everything twice."""
    while reply := await reader.read(1 << 16):
        writer.write(reply * 2)
        await writer.drain()
    writer.close()


async def _all_closed() -> None:
    """Wait until nobody carries anything any more."""
    while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - they are tasks of the servers
        await asyncio.sleep(0.01)


@pytest.fixture
async def far_end(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(await asyncio.start_unix_server(_engine, tmp_path / "engine"))
        server = await open_remote_end(tmp_path / "engine", SECRET, "127.0.0.1")
        await stack.enter_async_context(server)
        yield server.sockets[0].getsockname()[:2]


async def test_all_that_is_said_goes_there_and_back(tmp_path: Path, far_end: tuple[str, int]) -> None:
    async with await open_local_end(tmp_path / "near", SECRET, far_end):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        for size in (1, 100, 1 << 20):
            writer.write(b"x" * size)
            assert await reader.readexactly(2 * size) == b"x" * 2 * size
        writer.close()
        await _all_closed()


@pytest.mark.parametrize("reply", [b"\0" * 32, b"GET /pause HTTP/1.1\r\nHost: engine\r\n\r\n"])
async def test_who_does_not_know_the_secret_is_told_nothing(far_end: tuple[str, int], reply: bytes) -> None:
    reader, writer = await asyncio.open_connection(*far_end)
    assert len(await reader.readexactly(32)) == 32
    writer.write(reply[:32])
    assert await reader.read() == b""
    writer.close()
    await _all_closed()


async def test_a_proof_is_good_for_one_connection(tmp_path: Path, far_end: tuple[str, int]) -> None:
    async with await open_local_end(tmp_path / "near", b"another secret", far_end):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
        assert await reader.read() == b""
        writer.close()
        await _all_closed()
    nonces = set()
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*far_end)
        nonces.add(await reader.readexactly(32))
        writer.close()
    assert len(nonces) == 2
    await _all_closed()


# The guard of a process.


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
