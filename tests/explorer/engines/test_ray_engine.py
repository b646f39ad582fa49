"""What is ordered of a Ray cluster, and the tunnel that carries an engine's socket from another machine."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

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
