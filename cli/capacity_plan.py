"""This file is `tuneloop plan`: what an experiment takes, and whether it fits."""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer

from tuneloop.cli.options import ConfigOption, JsonOption, SetOption, echo, echo_json
from tuneloop.shared.capacity.fit import ASLEEP_ENGINE, CURE, fit_trainer, room_for_trainer, shapes_of, smallest
from tuneloop.shared.capacity.memory import (
    EXPLORER_BASE,
    WORKER_BASE,
    EngineMemory,
    TrainerMemory,
    VersionDisk,
    as_numbers,
    disk_speed,
    engine_memory,
    gpu_memory,
    moved_memory,
    offloaded_memory,
    trainer_memory,
    version_disk,
)
from tuneloop.shared.capacity.model_shape import ModelShape
from tuneloop.shared.disk_space import gigabytes, measure_space
from tuneloop.shared.errors import EnvironmentRefused
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
    """What an experiment takes. GPUs are numbered from 0; `problems` are sentences, empty where it fits.

    `micro_batch`: tokens at once, and whether activations are made again. `offloaded`: main memory for AdamW beside the
    GPUs'; `moved`: for what engine and trainer have on their GPU by turns.
    """

    shape: ModelShape
    gpus: int
    gpu_bytes: int | None
    engines: int
    engine: EngineMemory | None
    trainer: TrainerMemory | None
    offloaded: int
    moved: int
    micro_batch: tuple[int, bool]
    on_gpus: dict[int, list[str]]
    disk: VersionDisk
    free_disk: int
    publish_s: float
    problems: list[str]

    @property
    def idle_gpus(self) -> list[int]:
        """GPUs that nothing runs on."""
        return [number for number, users in self.on_gpus.items() if not users]


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
    made = make_plan(settings, gpu_bytes=gpu_memory() if gpu_memory_gb is None else int(gpu_memory_gb * 1e9))
    if for_programs:
        echo_json(_as_json(made, settings))
    else:
        echo("\n".join(_lines(made, settings)))
    if made.problems:
        raise EnvironmentRefused("\n".join(made.problems))


def make_plan(
    settings: Settings, *, gpu_bytes: int | None, speed: float | None = None, free: int | None = None
) -> ExperimentPlan:
    """Reckon it, for a machine with so many bytes of main memory `free`, by default this one's.

    Raises EnvironmentRefused where there is no model, or the disk cannot be written to.
    """
    shape, critic, teacher = shapes = shapes_of(settings)
    if gpu_bytes is None:  # nobody has said that it is for another machine
        settings = fit_to_machine(settings, gpus_here=count_gpus())
    room = None if gpu_bytes is None else room_for_trainer(settings, gpu_bytes)
    settings = fit_trainer(settings, shapes, room) or smallest(settings)
    serves, trains = settings.mode != "train", settings.mode != "serve"
    urls = settings.explorer.rollout_model.engine_urls
    disk = version_disk(shape, critic, settings)
    rate = disk_speed(settings.job_dir) if speed is None else speed
    engine = engine_memory(shape, settings, gpu_bytes) if serves and not urls else None
    trainer = trainer_memory(shape, critic, settings, teacher) if trains else None
    made = ExperimentPlan(
        shape=shape,
        gpus=settings.cluster.gpu_per_node,
        gpu_bytes=gpu_bytes,
        engines=settings.explorer.rollout_model.engine_num if serves and not urls else 0,
        engine=engine,
        trainer=trainer,
        offloaded=offloaded_memory(shape, critic, settings)
        if trains and (settings.trainer.optimizer_offload and trainer_on_gpu(settings))
        else 0,
        moved=moved_memory(engine, trainer) if _moves(settings) else 0,
        micro_batch=(settings.trainer.tokens_at_once, bool(settings.trainer.activation_checkpointing)),
        on_gpus=users_of_gpus(settings),
        disk=disk,
        free_disk=measure_space(settings.job_dir, needed=disk.all).free,
        publish_s=disk.newest / rate,
        problems=[],
    )
    here = free_memory() if free is None else free
    return made._replace(problems=[*_problems(made, settings), *_main_memory_problems(made, settings, here)])


def _problems(made: ExperimentPlan, settings: Settings) -> Iterator[str]:
    if made.engines and made.engine is not None and made.engine.cache <= 0:
        yield (
            f"explorer.rollout_model.gpu_memory_utilization: {settings.explorer.rollout_model.gpu_memory_utilization:g}"
            f" of a GPU with {gigabytes(made.gpu_bytes or 0)} holds no engine with {gigabytes(made.engine.weights)} of"
            " weights and room for one token; raise it, raise tensor_parallel_size, or choose a smaller model"
        )
    longest = settings.model.max_model_len or made.shape.max_length or 0
    if made.engine is not None and 0 < made.engine.cache_tokens < longest:
        yield (
            f"model.max_model_len: an engine has room for {made.engine.cache_tokens} tokens, and one reply may have"
            f" {longest}; lower it, or give the engine more memory"
        )
    for number, users in made.on_gpus.items():
        needed = _needed_on(made, users, settings)
        if made.gpu_bytes is not None and needed > made.gpu_bytes:
            yield (
                f"GPU {number} is too small: {' and '.join(users)} take {gigabytes(needed)}, it has"
                f" {gigabytes(made.gpu_bytes)}; lower trainer.micro_batch_tokens, {CURE}"
            )
    if settings.mode != "serve" and made.disk.all > made.free_disk:
        yield (
            f"checkpoint_root_dir: versions take {gigabytes(made.disk.all)}, {gigabytes(made.free_disk)} are free; make"
            " room, or lower trainer.max_checkpoints_to_keep"
        )


def _main_memory_problems(made: ExperimentPlan, settings: Settings, free: int) -> Iterator[str]:
    """What is in main memory and does not fit there."""
    if made.offloaded > free:
        yield (
            f"trainer.optimizer_offload: AdamW takes {gigabytes(made.offloaded)} of main memory, {gigabytes(free)} are"
            " free; write false, or algorithm.optimizer.bits: 8, or give it more memory"
        )
    if made.moved and made.moved + made.offloaded > free:
        yield (
            f"cluster.gpu_turn: what waits for its turn at the GPU takes {gigabytes(made.moved)} of main memory,"
            f" {gigabytes(free - made.offloaded)} are free; write null, or algorithm.optimizer.bits: 8"
        )
    parts: dict[str, int] = {}
    if made.engines and made.engine is not None and not made.gpus:
        parts["the engine" if made.engines == 1 else f"{made.engines} engines"] = made.engines * made.engine.total
    if made.trainer is not None and not trainer_on_gpu(settings):
        parts["the trainer"] = made.trainer.total
    if parts and settings.mode != "train":
        parts["the explorer"] = _explorer_bytes(settings)
    if parts and sum(parts.values()) > free:
        taken = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
        yield (
            f"model.model_path: main memory is too small without GPUs: {taken}, {gigabytes(free)} are free; choose a"
            " smaller model, train an adapter (model.lora.rank: 16), or give it GPUs (cluster.gpu_per_node)"
        )


def _moves(settings: Settings) -> bool:
    return settings.cluster.gpu_turn is not None and settings.cluster.gpu_per_node > 0


def _needed_on(made: ExperimentPlan, users: list[str], settings: Settings) -> int:
    needed = made.trainer.total if made.trainer and any(map(is_trainer, users)) else 0
    share = settings.explorer.rollout_model.gpu_memory_utilization
    engine = 0 if all(map(is_trainer, users)) else int(share * (made.gpu_bytes or 0))
    if _moves(settings):
        return max(engine, needed + ASLEEP_ENGINE)
    return needed + engine


def _as_json(made: ExperimentPlan, settings: Settings) -> dict[str, Any]:
    return {
        "model": {"family": made.shape.family, "weights": made.shape.weights, "stored_bytes": made.shape.stored_bytes},
        "gpus": made.gpus,
        "gpu_bytes": made.gpu_bytes,
        "engines": made.engines,
        "engine_bytes": as_numbers(made.engine) if made.engine else None,
        "trainer_bytes": as_numbers(made.trainer) if made.trainer else None,
        "offloaded_bytes": made.offloaded,
        "moved_bytes": made.moved,
        "micro_batch": {"tokens": made.micro_batch[0], "activation_checkpointing": made.micro_batch[1]},
        "explorer_bytes": _explorer_bytes(settings) if settings.mode != "train" else None,
        "on_gpus": {str(number): users for number, users in made.on_gpus.items()},
        "idle_gpus": made.idle_gpus,
        "disk_bytes": made.disk._asdict(),
        "free_disk_bytes": made.free_disk,
        "publish_seconds": made.publish_s,
        "problems": made.problems,
    }


def _explorer_bytes(settings: Settings) -> int:
    return EXPLORER_BASE + explorer_workers_of(settings) * WORKER_BASE


def _lines(made: ExperimentPlan, settings: Settings) -> Iterator[str]:
    shape = made.shape
    weights = f"{shape.weights / 1e9:.2f} B" if shape.weights > 1e8 else f"{shape.weights / 1e6:.2f} M"
    yield f"Model      {shape.folder}: {shape.family}, {weights} weights, {gigabytes(shape.stored_bytes)}"
    if settings.mode != "train":
        yield f"Explorer   {gigabytes(_explorer_bytes(settings))} of main memory"
        yield from _engine_lines(made)
    if made.trainer is not None:
        yield from _trainer_lines(made, made.trainer, settings)
    for number, users in made.on_gpus.items():
        yield f"GPU {number:<6} {' and '.join(users) or 'idle'}"
    if made.gpus and made.gpu_bytes is None:
        yield "           nvidia-smi does not say how much memory a GPU has: give --gpu-memory"


def _trainer_lines(made: ExperimentPlan, trainer: TrainerMemory, settings: Settings) -> Iterator[str]:
    disk, interval = made.disk, settings.trainer.save_interval
    on_gpu = made.gpus > 0 and trainer_on_gpu(settings)
    parts = (f"{name} {gigabytes(size)}" for name, size in trainer._asdict().items() if size)
    each = f"{settings.trainer_workers} x " if settings.trainer_workers > 1 else ""
    yield f"Trainer    {each}{gigabytes(trainer.total)} of {_place(on_gpu=on_gpu)} at the peak of a step"
    yield f"           {', '.join(parts)}"
    if made.offloaded:
        yield f"           {gigabytes(made.offloaded)} of {_place(on_gpu=False)} for AdamW"
    if made.moved:
        yield f"           {gigabytes(made.moved)} of {_place(on_gpu=False)} for what waits for its turn at the GPU"
    tokens, again = made.micro_batch
    yield f"           {tokens} tokens at once{', activations made again' if again else ''}"
    yield f"Disk       {gigabytes(disk.newest)} for a version to go on from, {gigabytes(disk.older)} for an older one"
    yield f"           {gigabytes(disk.all)} in all, {gigabytes(made.free_disk)} are free"
    yield f"Publishing {made.publish_s:.1f} s a version at this disk's speed, a version every {interval} step(s)"


def _engine_lines(made: ExperimentPlan) -> Iterator[str]:
    if made.engine is None or not made.engines:
        return
    place, cache = _place(on_gpu=made.gpus > 0), gigabytes(max(0, made.engine.cache))
    yield f"Engines    {made.engines} x {gigabytes(made.engine.total)} of {place}"
    yield f"           weights {gigabytes(made.engine.weights)}, {cache} for {made.engine.cache_tokens} tokens"


def _place(*, on_gpu: bool) -> str:
    return "GPU memory" if on_gpu else f"main memory ({gigabytes(free_memory())} free)"
