"""An engine of our own: a subprocess under a guard, which is vLLM, or runs vLLM on a node of a Ray cluster."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.ray_engine import SPEC_VARIABLE, RayEngineSpec
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import make_below
from tuneloop.shared.settings.hardware import free_memory
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.settings.types import umask_of

log = structlog.get_logger()

_STOP_TIMEOUT_S = 15.0
#: Seconds between two lines about an engine that is starting, which takes one to a few minutes.
_SAY_EVERY_S = 10.0

#: What an engine on a CPU takes beside its cache: Python and torch, and its weights, in float32 perhaps, read and held.
_RUNTIME_BYTES, _MOST_GROWTH = 2 << 30, 3

#: What vLLM's log says as each stage begins. A release that words it otherwise only makes the stage less exact.
_STAGES = (
    ("Starting to load model", "loading weights"),
    ("Loading safetensors", "loading weights"),
    ("Dynamo", "compiling"),
    ("KV cache", "making room for the cache"),
    ("apturing CUDA graph", "capturing CUDA graphs"),
    ("Graph capturing", "capturing CUDA graphs"),
    ("Starting vLLM", "starting its server"),
)


def start_stage(lines: Sequence[str]) -> str:
    return next((stage for line in reversed(lines) for sign, stage in _STAGES if sign in line), "importing")


class EngineProcess:
    def __init__(self, settings: Settings, engine: Engine, *, socket: Path) -> None:
        self._settings = settings
        self._engine = engine
        self._socket = socket
        self._log = settings.job_dir / "logs" / f"engine-{engine.number}.log"
        self._log_start = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, model: Path) -> None:
        """Start the engine with the weights in `model` and wait until it is healthy. Raises EnvironmentRefused."""
        try:
            make_below(self._log.parent)
            self._socket.unlink(missing_ok=True)
            command, environment = self.command(model)
            with self._log.open("ab") as output:
                self._log_start = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "tuneloop.explorer.engines.guard",
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    # A signal to our whole group must not kill the guard: the engine's own children would go on.
                    start_new_session=True,
                )
            if self._settings.cluster.node_num == 1:  # else it computes on another machine, perhaps
                self._engine.movement.pid = self._process.pid
        except OSError as error:  # no room for a process, its log or an open file, which may be over soon
            raise EnvironmentRefused(
                f"explorer.rollout_model: engine {self._engine.number} cannot be started: {error}"
            ) from error
        log.info("engine_starting", engine=self._engine.number, model=str(model), log=str(self._log))
        try:
            async with asyncio.timeout(self._settings.explorer.rollout_model.startup_timeout):
                assert self._process is not None
                began, said_at = time.monotonic(), 0.0
                while not await self._engine.control.healthy():
                    waited = time.monotonic() - began
                    if waited >= said_at + _SAY_EVERY_S:
                        said_at = waited
                        stage = start_stage(_lines(self._log, self._log_start))
                        log.info("engine_start_goes_on", engine=self._engine.number, seconds=round(waited), stage=stage)
                    if self._process.returncode is not None:
                        # The line that most likely says why it died.
                        lines = [line for line in _lines(self._log, self._log_start)[-200:] if line.strip()]
                        errors = [line for line in lines if "Error" in line] or lines or ["no output"]
                        raise EnvironmentRefused(
                            f"explorer.rollout_model: engine {self._engine.number} died at start (exit code "
                            f"{self._process.returncode}): {errors[-1].strip()[-300:]} - the full log is {self._log}"
                        )
                    await asyncio.sleep(0.25)
        except TimeoutError:
            await self.stop()
            raise EnvironmentRefused(
                f"engine {self._engine.number} was not ready within"
                f" {self._settings.explorer.rollout_model.startup_timeout:g} s; see why in {self._log}"
            ) from None

    def command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        settings = self._settings
        command = vllm.command(settings, model=model, socket=self._socket)
        if settings.cluster.node_num == 1:
            rollout, number = settings.explorer.rollout_model, self._engine.number
            if number >= rollout.engine_num and settings.cluster.gpu_per_node:
                # The surge capacity is on the last GPUs, or shares those of the only engine.
                last = settings.cluster.gpu_per_node // rollout.tensor_parallel_size - 1
                number = last if settings.has_spare_gpus else 0
            return command, vllm.environment(settings, number)
        spec = RayEngineSpec(
            ray_address=settings.cluster.ray_address,
            insecure=settings.explorer.insecure,
            gpus=settings.explorer.rollout_model.tensor_parallel_size if settings.cluster.gpu_per_node else 0,
            socket=str(self._socket),
            log=str(self._log),
            command=command,
            environment=vllm.engine_variables(settings),
            umask=umask_of(settings.trainer.checkpoint_mode),
        )
        environment = {**os.environ, SPEC_VARIABLE: msgspec.json.encode(spec).decode()}
        return [sys.executable, "-P", "-m", "tuneloop.explorer.engines.ray_engine"], environment

    def has_room(self) -> bool:
        """Whether this machine has room for it beside what runs now; that of GPUs, and of others, is the settings'."""
        rollout, cluster = self._settings.explorer.rollout_model, self._settings.cluster
        if rollout.spare_place or cluster.gpu_per_node or cluster.node_num > 1:
            return True
        try:
            files = self._settings.model.model_path.glob("*.safetensors")
            weights = sum(file.stat().st_size for file in files) * _MOST_GROWTH
            return free_memory() >= weights + (rollout.kv_cache_memory_bytes or 1 << 30) + _RUNTIME_BYTES
        except OSError:  # what cannot be read now, nor could be by an engine
            return False

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # for the guard this means that its owner has died
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


def _lines(path: Path, start: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
