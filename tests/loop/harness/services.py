"""The two services as they run in production: processes, a settings file, a port.

Where TUNELOOP_TEST_GPUS says how many GPUs there are, engines run on them.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from examples.sums.model import build, save
from tests.doubles.warm.orders import end_with_parent
from tests.doubles.warm.process import SERVICES, TRAINING, WarmProcess
from tests.doubles.warm.template import NAME
from tests.loop.harness.oracle import Oracle
from tuneloop.shared.checkpoints import CheckpointStore, Manifest
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import connect
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

READY_S = 600

GPUS = int(os.environ.get("TUNELOOP_TEST_GPUS", "0"))

#: A machine that runs many tests at once is so many times as slow as a quiet one.
_PATIENCE = 3

_RUN = (str(Path(sys.executable).with_name("tuneloop")), "run")
_COMMANDS = {"both": _RUN, "run": _RUN}


def free_port() -> int:
    """Below those that outgoing connections get: one of them could take it while its owner is being restarted."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


def make_model(folder: Path, seed: int = 0) -> Path:
    """A tiny untrained model in a folder."""
    torch.set_num_threads(1)
    save(*build(seed), folder)
    return folder


def write_settings(folder: Path, model: Path, **but: Any) -> Path:
    """Settings of an experiment of the tiny model on this machine; `but` replaces or adds whole sections."""
    values: dict[str, Any] = {
        "mode": "both",
        "project": "test",
        "name": "loop",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(model), "max_model_len": 1024, "max_response_tokens": 16},
        "algorithm": {"kl_coef": 0.0, "optimizer": {"lr": 0.001}, "critic_optimizer": {"lr": 0.001}},
        "explorer": {
            "listen_address": "127.0.0.1",
            "proxy_port": free_port(),
            "service_status_check_interval": 0.25,
            "rollout_model": {
                "dtype": "float32",
                "enforce_eager": True,
                "kv_cache_memory_bytes": 64 << 20,
                # A third less to start, and four times as fast where there are fewer cores than processes.
                "single_process": True,
                "enable_auto_tool_choice": True,
                "tool_call_parser": "hermes",
            },
        },
        "buffer": {"train_batch_size": 16},
        "trainer": {"poll_interval": 0.1, "device": "cpu"},
    }
    values |= but
    if GPUS:
        values["cluster"] = {"gpu_per_node": GPUS} | values.get("cluster", {})
        # Several engines share a GPU.
        values["explorer"].get("rollout_model", {}).setdefault("gpu_memory_utilization", 0.1)
    path = folder / "tuneloop.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def in_several_processes(config: Path) -> Path:
    """Have an engine's worker in a process of its own, as users have it who say nothing."""
    values = yaml.safe_load(config.read_text())
    del values["explorer"]["rollout_model"]["single_process"]
    config.write_text(yaml.safe_dump(values))
    return config


def started(
    command: Sequence[str], log: Path, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """A process group of its own, which does not outlive the tests."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


class Service:
    """A service, or both under their supervisor, as a process."""

    def __init__(
        self,
        config: Path,
        what: str,
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the `explorer`, the `trainer`, or with `run` what the settings' `mode` says; `both` is `run`, too."""
        self.settings: Settings = load_settings(config)
        self.url = f"http://127.0.0.1:{self.settings.explorer.proxy_port}"
        self.log = config.parent / f"{what}.log"
        flags = ("--config", str(config))
        if what in _COMMANDS or cwd or environment:
            command = _COMMANDS.get(what, (sys.executable, "-P", "-m", f"tuneloop.{what}"))
            self.process = started([*command, *flags], self.log, cwd=cwd, environment=environment)
            return
        with self.log.open("ab") as output:
            self.process = WarmProcess(
                [sys.executable, "-P", "-m", f"tuneloop.{what}", *flags],
                modules=TRAINING if what == "trainer" else SERVICES,
                ends_with_tests=True,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=60).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"not ready after {READY_S} s: {self.log.read_text()}")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60 * _PATIENCE)

    def kill(self) -> None:
        """SIGKILL to the whole process group, as a terminal or a shell would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(config: Path, what: str = "explorer") -> Iterator[Service]:
    """A service that is ready, and has ended without an error behind it."""
    service = Service(config, what)
    service.wait_until_ready()
    try:
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.log.read_text()


def client_of_engine(explorer: Service) -> httpx.Client:
    """A client of the explorer's engine itself, on its private socket."""
    return client_on(sockets(explorer)[0])


def client_on(socket: Path | str) -> httpx.Client:
    """A client of the engine that listens on a private socket."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine", timeout=120)


def sockets(explorer: Service) -> list[str]:
    """The private sockets of its engines."""
    commands = map(command_of, descendants(explorer.process.pid))
    return sorted({after for command in commands for before, after in pairwise(command) if before == "--uds"})


def commit(url: str) -> int:
    """Commit all that has a reward, once all that was acknowledged is in the database; how many that were."""

    def told() -> httpx.Response | None:
        said = httpx.post(f"{url}/commit", timeout=60)
        return said if said.status_code != 503 else None

    said = wait_for(told, why="the outbox does not get into the database")
    committed: int = said.raise_for_status().json()["committed"]
    return committed


def ledger_of(settings: Settings) -> Ledger:
    """A ledger of our own on the services' database."""
    return Ledger(connect(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name))


def wait_for(what: Any, *, timeout_s: float = 60, why: str = "it did not come true") -> Any:
    """The first true value of `what()`."""
    deadline = time.monotonic() + _PATIENCE * timeout_s
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.1)
    raise AssertionError(why)


def _parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def children(pid: int) -> list[int]:
    """The processes right below `pid`."""
    return [child for child, parent in _parents().items() if parent == pid and not _is_template(child)]


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`."""
    parents, found, frontier = _parents(), list[int](), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier and not _is_template(child)}
        found += frontier
    return found


def _is_template(pid: int) -> bool:
    """Whether it is nothing that is tested, but what children of its parent are forked from."""
    return command_of(pid)[:1] == [NAME]


def command_of(pid: int) -> list[str]:
    """The words that a process was started with; none where it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, whatever they are doing."""
    family = [process.pid, *descendants(process.pid)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(60)


def stage_by_hand(
    settings: Settings, ledger: Ledger, seed: int, make: Callable[[Path, int], Path] = make_model
) -> Callable[[], int]:
    """Write other weights, as a trainer would; what registers them as a version."""
    store, epoch = CheckpointStore(settings.job_dir), ledger.training.take_epoch("by hand")
    staging = store.stage(epoch)
    make(staging / "actor", seed)
    probe = Oracle(staging / "actor").probe(list(range(40, 72)))
    files = store.seal(staging)

    def publish(version: int) -> tuple[Path, str]:
        manifest = Manifest(
            version=version,
            parent=version - 1,
            step=version,
            epoch=epoch,
            base_model=str(settings.model.model_path),
            created_at=time.time(),
            dtype="float32",
            probe=probe,
            files=files,
        )
        return store.publish(staging, manifest)

    return lambda: ledger.training.register(epoch, [], step=1, publish=publish)


def wait_until_served(ledger: Ledger, version: int, *, timeout_s: float = 60) -> None:
    def outcome() -> VersionState | None:
        state = next(each for each in ledger.versions.all() if each.version == version).state
        return None if state is VersionState.CANDIDATE else state

    state = wait_for(outcome, timeout_s=timeout_s, why=f"version {version} is still a candidate")
    assert state is VersionState.CHAMPION
