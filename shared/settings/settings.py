"""Defines the settings: every option, its type and its default; validators are pure and models frozen.

Names and nesting are those of Trinity-RFT where it has the option, so that its YAML files load unchanged.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

from tuneloop.shared.job_marks import StepRules
from tuneloop.shared.settings.algorithm import OF_GROUPS, AlgorithmSettings
from tuneloop.shared.settings.feedback import (
    FeedbackSettings,
    JudgeSettings,
    PrivacySettings,
    RetentionSettings,
    RewardRule,
    TenantSettings,
)
from tuneloop.shared.settings.serving import ClusterSettings, ExplorerSettings, ModelSettings
from tuneloop.shared.settings.training import BufferSettings, TrainerSettings
from tuneloop.shared.settings.types import FolderName, Section, reveal
from tuneloop.shared.settings.versions import GateSettings, MonitorSettings, RolloutSettings


class PolicySettings(Section):
    """A [policy](policies.md) of its own, by its name."""

    parent: int | str = 0
    """What it begins with: the number of a version, or the name of a policy, whose champion is taken; 0 is the base
    model."""
    tenant: str = ""
    """The tenant whose keys may use it; empty: all keys."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What it has otherwise than the default policy, by dotted names: `{algorithm.algorithm_type: grpo}`. Of
    `algorithm`, `rollout`, `gate`, the batches' options of `buffer`, `model.lora.rank` and `alpha`, and of `trainer`
    `save_interval`, `max_staleness`, `total_steps` and `seed`."""


class Settings(Section):
    """All settings of one experiment."""

    mode: Literal["serve", "train", "both"] = "both"
    """Which services `tuneloop run` starts: the explorer (`serve`), the trainer (`train`), or
    [both](one_machine.md#systemd)."""
    project: FolderName = "tuneloop"
    """First folder below `checkpoint_root_dir`."""
    name: FolderName = "default"
    """The experiment's folder below the project."""
    checkpoint_root_dir: Path = Path("checkpoints")
    """`{checkpoint_root_dir}/{project}/{name}` is the job folder. Several machines mount it at the same path."""
    model: ModelSettings
    algorithm: AlgorithmSettings = AlgorithmSettings()
    cluster: ClusterSettings = ClusterSettings()
    explorer: ExplorerSettings = ExplorerSettings()
    trainer: TrainerSettings = TrainerSettings()
    buffer: BufferSettings = BufferSettings()
    reward: RewardRule = RewardRule()
    feedback: FeedbackSettings = FeedbackSettings()
    judge: JudgeSettings = JudgeSettings()
    retention: RetentionSettings = RetentionSettings()
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)
    """Defaults of a [tenant](keys.md#tenants) for requests: `{acme: {store: false, train:
    false, retention: {trained: 86400}}}`. `store: always` keeps replies to requests with [`store:
    false`](clients.md#codex)."""
    privacy: PrivacySettings = PrivacySettings()
    monitor: MonitorSettings = MonitorSettings()
    gate: GateSettings = GateSettings()
    rollout: RolloutSettings = RolloutSettings()
    policies: dict[str, PolicySettings] = Field(default_factory=dict)
    """[Policies](policies.md) by name, made at the start where they are missing."""

    @model_validator(mode="after")
    def _options_fit_each_other(self) -> "Settings":
        if contradictions := [*_contradictions(self)]:
            raise ValueError("\n".join(contradictions))
        return self

    @property
    def engine_places(self) -> int:
        """So many engines are there to those who send requests; one that can hold two adapters counts as two."""
        rollout = self.explorer.rollout_model
        engines = len(rollout.engine_urls) or rollout.engine_num
        holds_two = self.model.lora.rank > 0 and (self.rollout.tries or self.gate.mode != "off")
        return 2 if engines == 1 and holds_two else engines

    @property
    def spare_places(self) -> int:
        """So many engines may be started beside `engine_places`, to take the place of one of them."""
        rollout = self.explorer.rollout_model
        return 0 if self.model.lora.rank else rollout.spare_places(self.cluster, spare_gpus=self.has_spare_gpus)

    @property
    def has_spare_gpus(self) -> bool:
        """Whether one more engine has GPUs of its own, which are the last of this machine."""
        trainers = self.trainer_workers if self.mode == "both" and self.trainer.device != "cpu" else 0
        size = self.explorer.rollout_model.tensor_parallel_size
        return self.gpus_of_engines + trainers + size <= self.cluster.gpu_per_node

    @property
    def trainer_workers(self) -> int:
        """Processes that train: `trainer.workers`, which on its own is one for each GPU that no engine takes."""
        if self.trainer.workers is not None or not _trains_on_gpus(self):
            return self.trainer.workers or 1
        rollout = self.explorer.rollout_model
        spares = rollout.spare_place or (self.explorer.on_reload == "restart" and rollout.spare_place is None)
        spared = rollout.tensor_parallel_size if self.mode == "both" and spares else 0
        return max(1, _gpus_beside_engines(self) - spared)

    @property
    def gpus_of_engines(self) -> int:
        """GPUs that engines of our own take."""
        return self.explorer.rollout_model.gpus_of_engines

    @property
    def explorer_name(self) -> str:
        """What this machine's explorer is called: the same in all its processes, and after a restart."""
        return f"{socket.gethostname()}:{self.explorer.proxy_port}"

    @property
    def job_dir(self) -> Path:
        """The folder of this experiment: {checkpoint_root_dir}/{project}/{name}."""
        return (self.checkpoint_root_dir / self.project / self.name).absolute()

    @property
    def database_url(self) -> str:
        buffer = self.buffer.trainer_input.experience_buffer
        return reveal(buffer.path) or f"sqlite:///{self.job_dir / 'buffer' / buffer.name}.db"

    @property
    def outbox_dir(self) -> Path:
        return self.explorer.outbox_dir or self.job_dir / "outbox"

    @property
    def step_rules(self) -> StepRules:
        """Of how many experiences a trainer with this file makes a step, and of how many steps a version."""
        trainer, buffer = self.trainer, self.buffer
        return StepRules(buffer.train_batch_size, buffer.batch_timeout, trainer.save_interval, trainer.total_steps)

    @property
    def tensorboard_dir(self) -> Path:
        return self.job_dir / "monitor" / "tensorboard"

    @property
    def trainer_dtype(self) -> Literal["float32", "bfloat16"]:
        """The type of the weights in training: `trainer.dtype`, which on its own is bfloat16 on GPUs only."""
        if self.trainer.dtype != "auto":
            return self.trainer.dtype
        return "bfloat16" if self.cluster.gpu_per_node and self.trainer.device != "cpu" else "float32"

    @property
    def served_model_name(self) -> str:
        return self.model.served_model_name or str(self.model.model_path)


def _contradictions(settings: Settings) -> Iterator[str]:
    serves, trains = settings.mode != "train", settings.mode != "serve"
    explorer, cluster, algorithm = settings.explorer, settings.cluster, settings.algorithm
    yield from _contradictions_of_hardware(settings)
    yield from explorer.rollout_model.contradictions(
        adapters=settings.model.lora.rank > 0, on_cpu=serves and not cluster.gpu_per_node
    )
    of_pairs = trains and (algorithm.algorithm_type, settings.buffer.group_by) == ("dpo", "preference")
    yield from settings.reward.contradictions(of_pairs=of_pairs)
    yield from _contradictions_of_training(settings)
    yield from algorithm.contradictions()
    if settings.policies and not settings.model.lora.rank:
        yield "policies: all weights are trained, and an engine has one set of these: set model.lora.rank"
    yield from algorithm.overlong.contradictions(settings.model.max_response_tokens)
    for section in (settings.monitor, settings.judge, settings.privacy, settings.rollout):
        yield from section.contradictions()
    yield from explorer.contradictions(cluster, serves=serves, spare_gpus=settings.has_spare_gpus)
    yield from settings.gate.contradictions(tasks=settings.monitor.evaluation.path is not None)
    window, after = settings.reward.attribution_window, settings.judge.after
    if settings.judge.url and window is not None and after >= window:
        yield (
            f"judge.after: after {after:g} s verdicts come too late for reward.attribution_window, {window:g} s."
            " Lower the one or raise the other"
        )
    if settings.monitor.evaluation.judge == "model" and settings.judge.url is None:
        yield "monitor.evaluation.judge: model needs judge.url and judge.model: which model judges"


def _contradictions_of_hardware(settings: Settings) -> Iterator[str]:
    rollout, cluster, trainer, mode = (
        settings.explorer.rollout_model,
        settings.cluster,
        settings.trainer,
        settings.mode,
    )
    there, nodes, on_gpu = cluster.gpu_per_node, cluster.node_num, trainer.device != "cpu"
    room = there // rollout.tensor_parallel_size * nodes
    if mode != "train" and there and not rollout.engine_urls and rollout.engine_num > room:
        machines = "this machine has" if nodes == 1 else f"{nodes} machines have"
        yield (
            f"explorer.rollout_model.engine_num: {rollout.engine_num} engines of {rollout.tensor_parallel_size}"
            f" GPUs need {settings.gpus_of_engines}, {machines} {there * nodes} (mode: {mode}); an engine has all"
            " of its GPUs on one machine. Lower engine_num or tensor_parallel_size, raise cluster.gpu_per_node or"
            " cluster.node_num, or name engines elsewhere in engine_urls"
        )
    if mode == "both" and there and nodes > 1 and not rollout.engine_urls and on_gpu:
        yield (
            f"cluster.node_num: {nodes} machines' GPUs are given to engines by Ray, which knows nothing of the"
            " trainer's. Run the two apart: mode: serve here, and mode: train where GPUs are that Ray was not given"
        )
    shares = mode == "both" and on_gpu and 0 < there <= settings.gpus_of_engines
    if shares and rollout.gpu_memory_utilization > 0.5:
        yield (
            f"explorer.rollout_model.gpu_memory_utilization: {rollout.gpu_memory_utilization} leaves the trainer too"
            f" little of the GPU that it shares with an engine (cluster.gpu_per_node: {there}, mode: both). Write 0.4"
        )
    workers, free = trainer.workers or 1, _gpus_beside_engines(settings)
    if mode != "serve" and _trains_on_gpus(settings) and workers > 1 and free < workers:
        yield (
            f"trainer.workers: {workers} need a GPU each, and {max(free, 0)} are free of engines (mode: {mode},"
            f" cluster.gpu_per_node: {there}). Lower it, or write null: all that are free"
        )
    together = trainer.ulysses_sequence_parallel_size
    if mode != "serve" and settings.trainer_workers % together:
        yield (
            f"trainer.ulysses_sequence_parallel_size: {together} workers share each row of tokens, and"
            f" cluster.gpu_per_node: {there} leaves trainer.workers at {settings.trainer_workers}; write 1, or raise"
            f" either until the workers are a multiple of {together}"
        )
    length, response = settings.model.max_model_len, settings.model.max_response_tokens
    if length and response and response > length:
        yield (
            f"model.max_response_tokens: {response} do not fit into model.max_model_len, {length}."
            " Lower the one or raise the other"
        )
    if mode != "train" and settings.rollout.tries and settings.engine_places < 2:
        yield (
            f"rollout.mode: {settings.rollout.mode} serves two versions side by side, which needs two engines, or"
            " adapters; raise explorer.rollout_model.engine_num or model.lora.rank, or write rollout.mode: all"
        )
    if mode != "train" and settings.model.lora.rank and there > 0 and rollout.dtype == "float32":
        yield (
            "explorer.rollout_model.dtype: vLLM serves adapters on GPUs in bfloat16 and float16 only; write one of"
            " these, or model.lora.rank: 0"
        )


def _contradictions_of_training(settings: Settings) -> Iterator[str]:
    kind, group_by, trains = settings.algorithm.algorithm_type, settings.buffer.group_by, settings.mode != "serve"
    if settings.buffer.order == "priority" and group_by != "none":
        yield (
            "buffer.order: priority orders single experiences; with buffer.group_by write oldest or freshest, or"
            " write group_by: none"
        )
    if trains and kind in OF_GROUPS and group_by != "task":
        yield (
            f"buffer.group_by: {kind} compares the runs of a task with each other; write task, and"
            " buffer.group_size: how many runs a task has"
        )
    if trains and kind == "dpo" and group_by not in {"preference", "task"}:
        yield (
            "buffer.group_by: dpo learns from pairs of replies to one prompt; write preference, where people say"
            " which of two is better, or task, where rewards do"
        )
    if trains and settings.algorithm.credit != "call" and group_by not in {"run", "task"}:
        yield (
            f"algorithm.credit: {settings.algorithm.credit} needs whole trajectories; write buffer.group_by: run, or"
            " task"
        )
    bits, capture = settings.model.lora.base_bits, settings.explorer.capture.logprobs
    if bits and not settings.model.lora.rank:
        yield (
            f"model.lora.base_bits: {bits} bits are too few to train, and model.lora.rank: 0 trains all weights; write"
            " null, or a rank"
        )
    if bits and trains and capture != "all":
        yield (
            f"explorer.capture.logprobs: {capture} has the trainer recompute what an engine with the whole base model"
            f" sampled, and model.lora.base_bits: {bits} would compute something else; write all, or base_bits: null"
        )


def _trains_on_gpus(settings: Settings) -> bool:
    return settings.cluster.gpu_per_node > 0 and settings.trainer.device != "cpu"


def _gpus_beside_engines(settings: Settings) -> int:
    """GPUs of all machines that no engine of ours takes, if engines run where the trainer does."""
    there = settings.cluster.gpu_per_node * settings.cluster.node_num
    return there - (settings.gpus_of_engines if settings.mode == "both" else 0)


def options(section: type[Section] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = inner_section(field)
        if inner:
            yield from options(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def constants(section: type[Section] = Settings, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value that no file can change, by the dotted name that it would have as an option."""
    for name in sorted(section.__class_vars__ - {"model_config"}):
        yield f"{prefix}{name}", getattr(section, name)
    for name, field in section.model_fields.items():
        if inner := inner_section(field):
            yield from constants(inner, f"{prefix}{name}.")


def inner_section(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, None for an option."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _is_secret(kind: object) -> bool:
    return kind is SecretStr or any(map(_is_secret, get_args(kind)))


SECRETS = frozenset(name for name, field in options() if _is_secret(field.annotation))


def holds_secret(key: str) -> bool:
    """Whether the option or section of this name is a secret or has one."""
    return any(f"{secret}.".startswith(f"{key}.") for secret in SECRETS)


def may_be_secret(key: str) -> bool:
    """Whether a value that was written under this name may be a secret: its name, or that of a section, or unknown."""
    return not any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in _PUBLIC)


_PUBLIC = frozenset(name for name, _ in options()) - SECRETS
