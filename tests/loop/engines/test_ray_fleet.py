"""Engines on a Ray cluster: one is killed under load, and nobody who asks for a whole reply notices."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

from tests.install.foreign import Foreign
from tests.install.foreign import foreign as foreign
from tests.loop.harness.agent import PATIENCE
from tests.loop.harness.services import (
    GPUS,
    Service,
    alive,
    children,
    command_of,
    descendants,
    free_port,
    kill_tree,
    started,
    wait_for,
    write_settings,
)

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("ray")]

NAME = "on-ray"

#: As many as leave two cores time to start an engine meanwhile.
CLIENTS = 2

ASKED = {"messages": [{"role": "user", "content": "3+4="}], "max_tokens": 16}


def engines(cluster: int) -> dict[int, set[int]]:
    """All processes of each engine of a cluster, by the first of them: what runs right below a guard."""
    guards = {pid for pid in descendants(cluster) if "tuneloop.explorer.engines.guard" in " ".join(command_of(pid))}
    first = {pid for guard in guards for pid in children(guard)} - guards
    return {pid: {pid, *descendants(pid)} for pid in first}


@pytest.fixture
def ray(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator["tuple[str, subprocess.Popen[bytes]]"]:
    """A cluster of this machine, which has room for two engines, and whose token the explorer knows too."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    sockets = f"/tmp/ray-{os.getpid()}"  # their names must be short
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"),
        *(
            "--num-cpus=2",
            f"--num-gpus={GPUS}",
            "--object-store-memory=80000000",
            "--include-dashboard=false",
            "--disable-usage-stats",
        ),
        f"--temp-dir={sockets}",
    ]
    process = started(command, folder / "ray.log")
    try:
        wait_for(lambda: "Ray runtime started" in (folder / "ray.log").read_text(), timeout_s=120)
        yield f"{_address(folder / 'ray.log')}:{port}", process
    finally:
        kill_tree(process)  # asked to end, it may take minutes on a busy machine
        shutil.rmtree(sockets, ignore_errors=True)


def _address(log: Path) -> str:
    return next(line.rpartition(" ")[2] for line in log.read_text().splitlines() if "Local node IP" in line)


@pytest.fixture
def explorer(
    tmp_path: Path, model: Path, ray: "tuple[str, subprocess.Popen[bytes]]", foreign: Foreign
) -> Iterator[Service]:
    path = write_settings(tmp_path, model, cluster={"node_num": 2, "ray_address": ray[0]}, mode="serve")
    values = yaml.safe_load(path.read_text())
    values["explorer"]["rollout_model"] |= {"engine_num": 2, "single_process": True}
    values["model"]["served_model_name"] = NAME
    path.write_text(yaml.safe_dump(values))
    # Ray's workers import from the folder of the process that asked for them.
    service = Service(path, "explorer", cwd=foreign.folder)
    yield service
    assert service.stop() == 0
    assert foreign.imported() == []


async def _ask(client: openai.AsyncOpenAI, told: Counter[str], over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(0.1)  # an engine starts meanwhile, on the same cores
        stream = sum(told.values()) % 3 == 2
        try:
            if not stream:
                await client.chat.completions.create(model=NAME, **ASKED)
            else:
                async for piece in await client.chat.completions.create(model=NAME, stream=True, **ASKED):
                    last = piece.choices[0].finish_reason
                assert last
            told["well"] += 1
        except openai.APIError as error:
            # Streams that have begun break with their engine; they say so.
            told["broken_stream" if stream and "broke off" in str(error) else f"failed: {error!r}"] += 1


async def test_an_engine_killed_with_its_actor_under_load_fails_no_request_and_comes_back(
    explorer: Service, ray: "tuple[str, subprocess.Popen[bytes]]"
) -> None:
    _, cluster = ray

    def ready() -> int:
        return explorer.log.read_text().count("engine_ready")

    await asyncio.to_thread(explorer.wait_until_ready)
    await asyncio.to_thread(wait_for, lambda: ready() == 2, timeout_s=240, why="two engines did not start")
    before = engines(cluster.pid)
    assert len(before) == 2
    told: Counter[str] = Counter()
    over = asyncio.Event()
    async with (
        openai.AsyncOpenAI(base_url=f"{explorer.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CLIENTS):
            group.create_task(_ask(client, told, over))
        await asyncio.to_thread(wait_for, lambda: told["well"] > 20, timeout_s=120)
        actor = next(pid for pid in descendants(cluster.pid) if "EngineActor" in " ".join(command_of(pid)))
        os.kill(actor, signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: ready() == 3, timeout_s=240, why="the engine did not come back")
        after, so_far = engines(cluster.pid), told["well"]
        await asyncio.to_thread(wait_for, lambda: told["well"] > so_far + 20, timeout_s=120)
        over.set()
    assert set(told) <= {"well", "broken_stream"}, told
    assert told["broken_stream"] <= CLIENTS
    assert len(after) == 2
    assert len(before.keys() & after) == 1
    assert explorer.stop() == 0
    of_all = set().union(*before.values(), *after.values())
    await asyncio.to_thread(wait_for, lambda: not any(map(alive, of_all)), timeout_s=60, why="engines are left")
