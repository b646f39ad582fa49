"""This file is `tuneloop plan`: what an experiment takes, and whether it fits."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json
from tuneloop.shared.capacity import memory
from tuneloop.shared.capacity.memory import EngineMemory, TrainerMemory, VersionDisk
from tuneloop.shared.capacity.model_shape import ModelShape
from tuneloop.shared.checkpoints import gigabytes, measure_space
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.settings.base_model import require_trainable
from tuneloop.shared.settings.hardware import (
    count_gpus,
    explorer_workers_of,
    fit_to_machine,
    free_memory,
    is_trainer,
    trainer_on_gpu,
    users_of_gpus,
)
from tuneloop.shared.settings.loader import read_settings
from tuneloop.shared.settings.settings import Settings

GpuMemoryOption = Annotated[
    float | None,
    typer.Option("--gpu-memory", metavar="GB", min=0.1, help="A GPU's memory; default: as nvidia-smi says."),
]


class ExperimentPlan(NamedTuple):
    """What an experiment needs; GPUs count from 0, `problems` is empty if it fits, `settings` include defaults."""

    settings: Settings
    shape: ModelShape
    gpu_bytes: int | None
    engine: EngineMemory | None
    trainer: TrainerMemory | None
    main_memory: dict[str, int]
    on_gpus: dict[int, list[str]]
    disk: VersionDisk
    free_disk: int
    publish_s: float
    problems: list[str]


def plan(
    config: ConfigOption,
    set_: SetOption = None,
    gpu_memory_gb: GpuMemoryOption = None,
    for_programs: JsonOption = False,
) -> None:
    """Say what an experiment takes: memory by process, disk by version, seconds by publication, GPUs that idle.

    Starts nothing; 64 MiB are written to measure the disk. Exit code 3 if there is no such model, or it does not fit.
    """
    settings = read_settings(config, set_ or ()).valid_settings()
    require_trainable(settings)
    gpu_bytes = memory.gpu_memory() if gpu_memory_gb is None else int(gpu_memory_gb * 1e9)
    made = make_plan(settings, gpu_bytes=gpu_bytes)
    if for_programs:
        trainer = made.settings.trainer
        echo_json(
            {
                "model": {"family": made.shape.family, "weights": made.shape.weights},
                "gpus": made.settings.cluster.gpu_per_node,
                "gpu_bytes": made.gpu_bytes,
                "engines": made.settings.explorer.rollout_model.engine_num if made.engine else 0,
                "engine_bytes": made.engine and made.engine._asdict() | {"total": made.engine.total},
                "trainer_bytes": made.trainer and made.trainer._asdict() | {"total": made.trainer.total},
                "main_memory_bytes": made.main_memory,
                "micro_batch": {
                    "tokens": trainer.tokens_at_once,
                    "activation_checkpointing": bool(trainer.activation_checkpointing),
                },
                "on_gpus": {str(number): users for number, users in made.on_gpus.items()},
                "idle_gpus": [number for number, users in made.on_gpus.items() if not users],
                "disk_bytes": made.disk._asdict(),
                "free_disk_bytes": made.free_disk,
                "publish_seconds": made.publish_s,
                "problems": made.problems,
            }
        )
    else:
        echo("\n".join(_lines(made)))
    if made.problems:
        raise EnvironmentRefused("\n".join(made.problems))


def make_plan(
    settings: Settings, *, gpu_bytes: int | None, speed: float | None = None, free: int | None = None
) -> ExperimentPlan:
    """Estimate it, for a machine with so many bytes of main memory `free`, by default this one's.

    Raises EnvironmentRefused where there is no model, or the disk cannot be written to.
    """
    shapes = memory.shapes_of(settings)
    if gpu_bytes is None:  # no option says that it is for another machine
        settings = fit_to_machine(settings, gpus_here=count_gpus())
    fit = memory.fit_trainer(settings, shapes, gpu_bytes and memory.room_for_trainer(settings, gpu_bytes))
    settings = fit.settings
    rollout, gpus = settings.explorer.rollout_model, settings.cluster.gpu_per_node
    serves = settings.mode != "train"
    engine = memory.engine_memory(shapes[0], settings, gpu_bytes) if serves and not rollout.engine_urls else None
    trainer = fit.memory if settings.mode != "serve" else None
    taken: dict[str, int] = {}
    if engine and not gpus:
        engines = "the engine" if rollout.engine_num == 1 else f"{rollout.engine_num} engines"
        taken[engines] = rollout.engine_num * engine.total
    if trainer and not trainer_on_gpu(settings):
        taken["the trainer"] = trainer.teacher + settings.trainer_workers * (trainer.total - trainer.teacher)
    if trainer and trainer.offloaded:
        taken["AdamW"] = trainer.offloaded
    if settings.model.lora.rank and (adapters := memory.policies_memory(shapes, settings)):
        taken["adapters of policies"] = adapters
    if serves:
        workers = explorer_workers_of(settings) * memory.WORKER_BASE
        taken["the explorer"] = memory.EXPLORER_BASE + workers
    disk = memory.version_disk(shapes, settings)
    made = ExperimentPlan(
        settings=settings,
        shape=shapes[0],
        gpu_bytes=gpu_bytes,
        engine=engine,
        trainer=trainer,
        main_memory=taken,
        on_gpus=users_of_gpus(settings),
        disk=disk,
        free_disk=measure_space(settings.job_dir, needed=disk.all).free,
        publish_s=disk.newest / (speed or disk_speed(settings.job_dir)),
        problems=[],
    )
    made.problems.extend(_problems(made, free_memory() if free is None else free))
    return made


def _problems(made: ExperimentPlan, free: int) -> Iterator[str]:
    settings, engine, trainer = made.settings, made.engine, made.trainer
    share = settings.explorer.rollout_model.gpu_memory_utilization
    if engine is not None and engine.cache <= 0:
        yield (
            f"explorer.rollout_model.gpu_memory_utilization: {share:g} of a GPU with {gigabytes(made.gpu_bytes or 0)}"
            f" holds no engine with {gigabytes(engine.weights)} of weights, {gigabytes(engine.adapters)} for adapters"
            " and room for one token; raise it, raise tensor_parallel_size, lower model.lora.resident, or choose a"
            " smaller model"
        )
    longest = settings.model.max_model_len or made.shape.max_length or 0
    if engine is not None and 0 < engine.cache_tokens < longest:
        yield (
            f"model.max_model_len: an engine has room for {engine.cache_tokens} tokens, and one reply may have"
            f" {longest}; lower it, or give the engine more memory"
        )
    for number, users in made.on_gpus.items():
        needed = trainer.total if trainer and any(map(is_trainer, users)) else 0
        beside = 0 if all(map(is_trainer, users)) else int(share * (made.gpu_bytes or 0))
        needed += beside
        if made.gpu_bytes is not None and needed > made.gpu_bytes:
            yield (
                f"GPU {number} is too small: {' and '.join(users)} take {gigabytes(needed)}, it has"
                f" {gigabytes(made.gpu_bytes)}; lower trainer.micro_batch_tokens, {memory.cure_of(settings)}"
            )
    if trainer is not None and made.disk.all > made.free_disk:
        yield (
            f"checkpoint_root_dir: versions take {gigabytes(made.disk.all)}, {gigabytes(made.free_disk)} are free; make"
            " room, or lower trainer.max_checkpoints_to_keep"
        )
    if made.main_memory.keys() - {"the explorer"} and sum(made.main_memory.values()) > free:
        each = ", ".join(f"{name} {gigabytes(size)}" for name, size in made.main_memory.items())
        yield (
            f"model.model_path: main memory is too small: {each}, {gigabytes(free)} are free; choose a smaller model,"
            " train an adapter (model.lora.rank: 16), write algorithm.optimizer.bits: 8 or"
            " trainer.optimizer_offload: false, or give it GPUs (cluster.gpu_per_node)"
        )


def _lines(made: ExperimentPlan) -> Iterator[str]:
    shape, settings, engine, trainer, disk = made.shape, made.settings, made.engine, made.trainer, made.disk
    weights = f"{shape.weights / 1e9:.2f} B" if shape.weights > 1e8 else f"{shape.weights / 1e6:.2f} M"
    yield f"Model      {shape.folder}: {shape.family}, {weights} weights"
    here = f"main memory ({gigabytes(free_memory())} free)"
    if size := made.main_memory.get("the explorer"):
        yield f"Explorer   {gigabytes(size)} of {here}"
    if engine is not None:
        place = "GPU memory" if settings.cluster.gpu_per_node else here
        yield f"Engines    {settings.explorer.rollout_model.engine_num} x {gigabytes(engine.total)} of {place}"
        cache = gigabytes(max(0, engine.cache))
        adapters = f"{gigabytes(engine.adapters)} for adapters, " if engine.adapters else ""
        yield f"           weights {gigabytes(engine.weights)}, {adapters}{cache} for {engine.cache_tokens} tokens"
    if size := made.main_memory.get("adapters of policies"):
        yield f"Policies   {gigabytes(size)} of {here} for adapters that do not sample or train just now"
    if trainer is not None:
        each = f"{settings.trainer_workers} x " if settings.trainer_workers > 1 else ""
        place = "GPU memory" if settings.cluster.gpu_per_node and trainer_on_gpu(settings) else here
        yield f"Trainer    {each}{gigabytes(trainer.total)} of {place} at the peak of a step"
        parts = (f"{name} {gigabytes(size)}" for name, size in trainer._asdict().items() if size)
        yield f"           {', '.join(parts)}"
        for name in ("AdamW", "what waits for its turn at the GPU"):
            if size := made.main_memory.get(name):
                yield f"           {gigabytes(size)} of {here} for {name}"
        again = ", with activation checkpointing" if settings.trainer.activation_checkpointing else ""
        yield f"           {settings.trainer.tokens_at_once} tokens at once{again}"
        older = gigabytes(disk.older)
        yield f"Disk       {gigabytes(disk.newest)} for a version to go on from, {older} for an older one"
        yield f"           {gigabytes(disk.all)} in all, {gigabytes(made.free_disk)} are free"
        steps = settings.trainer.save_interval
        yield f"Publishing {made.publish_s:.1f} s a version at this disk's speed, a version every {steps} step(s)"
    for number, users in made.on_gpus.items():
        yield f"GPU {number:<6} {' and '.join(users) or 'idle'}"
    if settings.cluster.gpu_per_node and made.gpu_bytes is None:
        yield "           nvidia-smi does not say how much memory a GPU has: give --gpu-memory"


def disk_speed(folder: Path) -> float:
    """Bytes a second that reach the disk below `folder`: 64 MiB are written and removed. Raises EnvironmentRefused."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))
    size, pieces = 4 << 20, 16
    piece = os.urandom(size)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            started = time.monotonic()
            for _ in range(pieces):
                file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
            return pieces * size / max(1e-6, time.monotonic() - started)
    except OSError as error:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: cannot write to {there}: {error.strerror}; choose another folder"
        ) from None
