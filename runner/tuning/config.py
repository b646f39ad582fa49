"""Checks the arguments of tune() (models, algorithm, workflow, judge) and generates the settings of a service."""

import inspect
import math
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.models.bound_model import CallDefaults
from tuneloop.runner.trinity import ALIASES, ATTENTION, MLP, OF_GROUPS, ONE_MACHINE, instead_of
from tuneloop.runner.tuning.views import View


@dataclass(slots=True)
class WorkflowOutput:
    """A workflow's result: a reward (or one per trained model, by name), or a response for the judge."""

    reward: float | Mapping[str, float] | None = None
    response: Any = None
    metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _require_metrics(self.metrics)


@dataclass(slots=True)
class JudgeOutput:
    reward: float | Mapping[str, float]
    metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _require_metrics(self.metrics)


def _require_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"metrics: {metrics!r} is no mapping of names to numbers")


#: `async (task, model[, auxiliary_models][, logger][, run]) -> WorkflowOutput`; a plain function runs in a thread.
WorkflowType = Callable[..., Awaitable[WorkflowOutput] | WorkflowOutput]

#: `async (task, response[, auxiliary_models][, logger][, run]) -> JudgeOutput`; a plain function runs in a thread.
JudgeType = Callable[..., Awaitable[JudgeOutput] | JudgeOutput]


#: Values of `monitor_type`. Curves always go to TensorBoard files; wandb and mlflow get the trainer's curves too.
MONITORS = ("tensorboard", "wandb", "mlflow")

#: Algorithms that learn from rewards; the first ones compare the runs of a task.
ALGORITHMS = (*OF_GROUPS[:-1], "ppo", "reinforce", "reinforce++", "raft", "sft", "kto", "dpo")


@dataclass(slots=True)
class TinkerConfig:
    """A low-rank adapter, named as in AgentScope's tuner. `seed`, `train_unembed` and `base_url` have no effect."""

    rank: int = 16
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None

    def __post_init__(self) -> None:
        require_whole(self, "rank", least=1)
        if not (self.train_mlp or self.train_attn):
            raise TuneRefused("TinkerConfig: train_mlp and train_attn are both False: nothing would be trained")


@dataclass(slots=True)
class TunerModelConfig:
    """A trained or auxiliary model: its folder, its engines, and the defaults of its calls."""

    model_path: str
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = 1
    inference_engine_num: int = 1
    tool_call_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    tinker_config: TinkerConfig | None = None

    def __post_init__(self) -> None:
        self.model_path = str(self.model_path)
        if not self.model_path:
            raise TuneRefused("TunerModelConfig: model_path is empty: name the folder of the model")
        for name in ("tensor_parallel_size", "inference_engine_num", "max_tokens"):
            require_whole(self, name, least=1)
        if self.max_model_len is not None:
            require_whole(self, "max_model_len", least=1)
        require_number(self, "temperature", 0, 2)
        require_number(self, "top_p", 0, 1, above=True)

    def call_defaults(self, model_name: str | None = None) -> CallDefaults:
        """Defaults of a call. `max_tokens` above `max_model_len` becomes None: the service then sets the limit."""
        short = self.max_model_len is None or self.max_tokens < self.max_model_len
        return CallDefaults(
            model_name=model_name or self.model_path,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens if short else None,
            enable_thinking=self.enable_thinking,
        )


@dataclass(slots=True)
class AlgorithmConfig:
    """How to train: a step has `batch_size` tasks, each with `group_size` runs that are compared."""

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100

    def __post_init__(self) -> None:
        self.algorithm_type = ALIASES.get(self.algorithm_type, self.algorithm_type)
        if self.algorithm_type not in ALGORITHMS:
            if instead := instead_of(str(self.algorithm_type)):
                where = " in a settings file: tune() gives rewards" if "distill" in instead else ""
                raise TuneRefused(f"algorithm_type: {self.algorithm_type!r}: {instead}{where} (docs/methods.md)")
            near = get_close_matches(str(self.algorithm_type), ALGORITHMS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TuneRefused(
                f"algorithm_type: there is no {self.algorithm_type!r} here; there are {', '.join(ALGORITHMS)}.{hint}"
            )
        for name in ("group_size", "batch_size", "save_interval_steps", "eval_interval_steps"):
            require_whole(self, name, least=1)
        if self.algorithm_type in OF_GROUPS and self.group_size < 2:
            raise TuneRefused(
                f"group_size: {self.algorithm_type} compares the runs of a task with each other and needs at least 2; "
                "with 1 use ppo, reinforce or reinforce++"
            )
        require_number(self, "learning_rate", 0, 1, above=True)


def require_whole(config: Any, name: str, *, least: int) -> None:
    """Raise TuneRefused unless the field is an integer of at least `least`."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TuneRefused(f"{_owner(config)}{name} must be a whole number of at least {least}, not {value!r}")


def require_number(config: Any, name: str, least: float, most: float, *, above: bool = False) -> None:
    """Raise TuneRefused unless the field is in [least, most], or in (least, most] with `above`."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise TuneRefused(f"{_owner(config)}{name} must be a number from {least} to {most}, not {value!r}")
    if above and value == least:
        raise TuneRefused(f"{_owner(config)}{name} must be above {least}")


def _owner(config: Any) -> str:
    return f"{type(config).__name__}: " if type(config).__name__.endswith("Config") else ""


MAIN = "model"  # the name of the only trained model
CONCURRENCY, RUN_TIMEOUT_S = 64, 600.0  # default concurrency of runs, and timeout of a run in seconds

#: Type of each argument, and its description in messages.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "algorithm": (AlgorithmConfig, "an AlgorithmConfig"),
    "model": (TunerModelConfig, "a TunerModelConfig"),
    "models": (Mapping, "a dict of names and TunerModelConfigs"),
    "auxiliary_models": (Mapping, "a dict of names and models"),
    "project_name": (str, "a text"),
    "experiment_name": (str, "a text"),
    "service": ((str, Mapping), "a URL, or a dict of models' names and URLs"),
    "policy": ((str, Mapping), "a name, or a dict of models' names and policies' names"),
    "settings": (Mapping, "a dict"),
    "checkpoint_root_dir": ((str, PathLike), "a path"),
    "seed": (int, "a whole number"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The checked arguments of tune(). Raises TuneRefused for an invalid one."""

    workflow_func: WorkflowType
    judge_func: JudgeType | None
    train_dataset: Any
    eval_dataset: Any
    model: TunerModelConfig | None
    auxiliary_models: Mapping[str, Any] | None
    algorithm: AlgorithmConfig | None
    project_name: str | None
    experiment_name: str | None
    monitor_type: str | None
    service: str | Mapping[str, str] | None
    policy: str | Mapping[str, str] | None
    models: Mapping[str, TunerModelConfig] | None
    resume: bool
    api_key: str
    checkpoint_root_dir: str | Path | None
    settings: Mapping[str, Any] | None
    concurrency: int | None
    run_timeout: float | None
    retries: int
    max_failures: float
    max_staleness: int
    shuffle: bool
    seed: int
    eval_temperature: float | None
    evaluate_before: bool
    evaluate_after: bool
    service_timeout: float
    start_timeout: float
    join_timeout: float
    step_timeout: float
    view: View | None
    warning: str | None = None

    def __post_init__(self) -> None:
        for name, (kinds, words) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise TuneRefused(f"{name} must be {words}, not {value!r}")
        for name in ("concurrency", "retries", "max_staleness"):
            if getattr(self, name) is not None:
                require_whole(self, name, least=int(name == "concurrency"))
        for name in ("run_timeout", "service_timeout", "start_timeout", "join_timeout", "step_timeout"):
            if getattr(self, name) is not None:
                require_number(self, name, 0, math.inf, above=True)
        require_number(self, "max_failures", 0, 1)
        if self.eval_temperature is not None:
            require_number(self, "eval_temperature", 0, 2)
        for url in self.service.values() if isinstance(self.service, Mapping) else [self.service] * bool(self.service):
            if not re.match(r"https?://[^/]", str(url)):
                raise TuneRefused(f"service: {url!r} is no URL such as http://localhost:8010")
        if self.policy is not None and self.service is None:
            raise TuneRefused("policy: a policy is one of a service that runs: give service='http://…' too")
        if self.model is not None and self.models:
            raise TuneRefused("model= and models= are both given: models= names all models that are trained")

    @property
    def trained_models(self) -> dict[str, TunerModelConfig]:
        return dict(self.models or ({MAIN: self.model} if self.model else {}))

    @property
    def urls(self) -> dict[str, str]:
        names = list(self.models or [MAIN])
        return {names[0]: self.service} if isinstance(self.service, str) else dict(self.service or {})

    @property
    def policies(self) -> dict[str, str]:
        names = list(self.urls)
        found = {names[0]: self.policy} if isinstance(self.policy, str) else dict(self.policy or {})
        if missing := [name for name in found if name not in names]:
            raise TuneRefused(f"policy: {', '.join(missing)} has no URL: name it in service=")
        return found


_Needed = tuple[tuple[str, ...], ...]

#: Parameters that a function must have (one of each group), and those that it may have.
_WORKFLOW = (("task",), ("model", "run", "runs")), ("auxiliary_models", "logger")
_JUDGE = (("task",), ("response",)), ("auxiliary_models", "logger", "run", "runs")

_SHOWN = {
    "workflow": "async def workflow(task, model, auxiliary_models=None, logger=None, run=None) -> WorkflowOutput",
    "judge": "async def judge(task, response, auxiliary_models=None, logger=None, run=None) -> JudgeOutput",
}


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise TuneRefused unless the function accepts a workflow's arguments; `run` may replace `model`."""
    _check(function, "workflow", *_WORKFLOW)


def check_judge_function(function: Callable[..., Any]) -> None:
    """Raise TuneRefused unless the function accepts a judge's arguments."""
    _check(function, "judge", *_JUDGE)


def _check(function: Callable[..., Any], kind: str, needed: _Needed, offered: tuple[str, ...]) -> None:
    if not callable(function):
        raise TuneRefused(f"the {kind} is {function!r}, not a function; it should be\n    {_SHOWN[kind]}")
    if inspect.isclass(function):
        raise TuneRefused(f"the {kind} is the class {function.__name__}; give an instance of it, or a function")
    problems = _problems(function, needed, offered)
    if problems:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        written = ""
        with suppress(TypeError, ValueError):
            written = str(inspect.signature(function))
        raise TuneRefused(
            f"the {kind} {name}{written} {'; '.join(problems)}. It is called by name, and should be\n"
            f"    {_SHOWN[kind]}\nwhere async and parameters with a default are optional"
        )


def _problems(function: Callable[..., Any], needed: _Needed, offered: tuple[str, ...]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ["has a signature that cannot be read"]
    wild = [name for name, each in parameters.items() if each.kind in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
    problems = [f"has no parameter {' or '.join(names)}" for names in needed if not {*names} & {*parameters}]
    problems += [f"takes {name} by position only" for name in by_place]
    problems += [f"takes *{name}, which gets no arguments" for name in wild]
    others = [
        name
        for name, each in parameters.items()
        if name not in {*chain(*needed), *offered, *wild, *by_place} and each.default is each.empty
    ]
    return problems + [f"requires {name}, which is not passed" for name in others]


Settings = dict[str, Any]

_SHARED_GPU = 0.4  # memory share of an engine on the GPU that the trainer uses too


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlace:
    """A service's folder, `checkpoint_root_dir`/`project`/`name`, and its port."""

    project: str = "AgentScope"
    name: str = "Experiment"
    checkpoint_root_dir: str | Path = "checkpoints"
    port: int = 8010


def service_settings(
    model: TunerModelConfig,
    algorithm: AlgorithmConfig,
    place: ServicePlace,
    *,
    monitor_type: str | None = None,
    gpus: int | None = None,
    over: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of explorer and trainer for one model; `over` wins, `gpus` None counts them. Raises TuneRefused."""
    if monitor_type is not None and monitor_type not in MONITORS:
        raise TuneRefused(f"monitor_type: there is no {monitor_type!r} here; there are {', '.join(MONITORS)}")
    if model.temperature == 0:
        raise TuneRefused(
            "TunerModelConfig: temperature 0 gives the same reply every time, so there is nothing to compare: "
            "train at 1.0"
        )
    gpus = count_gpus() if gpus is None else gpus
    cluster = dict((over or {}).get("cluster") or {})
    if gpus and cluster.get("gpu_per_node"):
        gpus = cluster["gpu_per_node"] = min(gpus, int(cluster["gpu_per_node"]))
        over = {**(over or {}), "cluster": cluster}
    if int(cluster.get("node_num") or 1) > 1:
        raise TuneRefused(f"cluster.node_num: {ONE_MACHINE.format(cluster['node_num'])}")
    rollout: Settings = {
        "engine_num": model.inference_engine_num,
        "tensor_parallel_size": model.tensor_parallel_size,
        "enable_auto_tool_choice": model.tool_call_parser is not None,
        "tool_call_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser,
    }
    wanted = model.inference_engine_num * model.tensor_parallel_size
    if not gpus:
        rollout["dtype"] = "float32"
    elif wanted > gpus:
        raise TuneRefused(
            f"TunerModelConfig: inference_engine_num {model.inference_engine_num} x tensor_parallel_size "
            f"{model.tensor_parallel_size} is more than the {gpus} available GPUs"
        )
    elif wanted == gpus:
        rollout["gpu_memory_utilization"] = _SHARED_GPU
        # Methods that compare runs train on the runs of a task together; others on the calls of a run.
    compared = algorithm.algorithm_type in OF_GROUPS
    buffer: Settings = {
        "group_by": "task" if compared else "run",
        "train_batch_size": algorithm.batch_size * algorithm.group_size,
    }
    if compared:
        buffer["group_size"] = algorithm.group_size
    short = model.max_model_len is None or model.max_tokens < model.max_model_len
    trained: Settings = {
        "model_path": model.model_path,
        "max_model_len": model.max_model_len,
        "max_response_tokens": model.max_tokens if short else None,
        "temperature": model.temperature,
    }
    if (adapter := model.tinker_config) is not None:
        targets = ATTENTION * adapter.train_attn + MLP * adapter.train_mlp
        trained["lora"] = {"rank": adapter.rank, "targets": list(targets)}
    made: Settings = {
        "mode": "both",
        "project": place.project,
        "name": place.name,
        "checkpoint_root_dir": str(place.checkpoint_root_dir),
        "model": trained,
        "cluster": {"gpu_per_node": gpus},
        "algorithm": {"algorithm_type": algorithm.algorithm_type, "optimizer": {"lr": algorithm.learning_rate}},
        "explorer": {"listen_address": "127.0.0.1", "proxy_port": place.port, "rollout_model": rollout},
        "trainer": {"save_interval": 1},
        "buffer": buffer,
        # The judge is the caller's own function, so its rewards are not clipped.
        "reward": {"clip": None},
    }
    if monitor_type is not None:
        made["monitor"] = {"monitor_type": monitor_type}
    return merge_settings(made, over or {})


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    both = {
        name: merge_settings(settings[name], each)
        for name, each in changes.items()
        if isinstance(settings.get(name), Mapping) and isinstance(each, Mapping)
    }
    return {**settings, **changes, **both}


def count_gpus() -> int:
    """GPUs visible to this process; 0 without an NVIDIA driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())
