"""What `tune()` is told: the model to train, the algorithm, and what workflows and judges give back.

The names and defaults are those of AgentScope's tuner (1.0.21): a file written for it needs another import only.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.models.bound_model import CallDefaults


@dataclass(slots=True)
class WorkflowOutput:
    """What a workflow made of a task: the reward itself, or a response for the judge; and figures to be logged.

    Of several models that are trained each may have a reward of its own, by its name.
    """

    reward: float | Mapping[str, float] | None = None
    response: Any = None
    metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for metrics that are no mapping."""
        _require_metrics(self.metrics)


@dataclass(slots=True)
class JudgeOutput:
    """What a judge says of a response."""

    reward: float | Mapping[str, float]
    metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for metrics that are no mapping."""
        _require_metrics(self.metrics)


def _require_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"metrics: {metrics!r} is no mapping of names to numbers")


#: `async (task, model[, auxiliary_models][, logger][, run]) -> WorkflowOutput`; a plain function runs in a thread.
WorkflowType = Callable[..., Awaitable[WorkflowOutput] | WorkflowOutput]

#: `async (task, response[, auxiliary_models][, logger][, run]) -> JudgeOutput`; a plain function runs in a thread.
JudgeType = Callable[..., Awaitable[JudgeOutput] | JudgeOutput]


#: What `monitor_type` may name: the curves are TensorBoard files always, and the last two get the trainer's as well.
MONITORS = ("tensorboard", "wandb", "mlflow")

#: The algorithms that learn from rewards, by our names; those that compare the runs of a task with each other.
ALGORITHMS = ("multi_step_grpo", "grpo", "rloo", "ppo", "reinforce", "reinforce++", "raft", "sft", "kto", "dpo")
OF_GROUPS = ("multi_step_grpo", "grpo", "rloo", "dpo")

#: What others call them.
_ALIASES = {
    "reinforceplusplus": "reinforce++",
    "reinforce_plus_plus": "reinforce++",
    "grpo_verl": "grpo",
    "multi-step-grpo": "multi_step_grpo",
}


@dataclass(slots=True)
class TinkerConfig:
    """A low-rank adapter instead of all weights, as AgentScope's tuner has it for Tinker; here it is trained as usual.

    `seed`, `train_unembed` and `base_url` have no effect.
    """

    rank: int = 16
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None

    def __post_init__(self) -> None:
        """Raise TuneRefused for a value that makes no sense."""
        require_whole(self, "rank", least=1)
        if not (self.train_mlp or self.train_attn):
            raise TuneRefused("TinkerConfig: train_mlp and train_attn are both False: nothing would be trained")


@dataclass(slots=True)
class TunerModelConfig:
    """The model to be trained, or an auxiliary one, and how it is served.

    `temperature`, `top_p`, `max_tokens` and `enable_thinking` are what calls say unless they say otherwise.
    """

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
        """Raise TuneRefused for a value that makes no sense."""
        self.model_path = str(self.model_path)
        if not self.model_path:
            raise TuneRefused("TunerModelConfig: model_path is empty: name the folder of the model")
        for name in ("tensor_parallel_size", "inference_engine_num", "max_tokens"):
            require_whole(self, name, least=1)
        if self.max_model_len is not None:
            require_whole(self, "max_model_len", least=1)
        require_number(self, "temperature", 0, 2)
        require_number(self, "top_p", 0, 1)
        if self.top_p == 0:
            raise TuneRefused("TunerModelConfig: top_p must be above 0")

    def call_defaults(self, model_name: str | None = None) -> CallDefaults:
        """What calls say unless they say otherwise; `model_name` is the name that the service has for the model.

        A reply may have `max_tokens` tokens, as far as `max_model_len` leaves room beside its prompt: the limit is left
        to the service where it is not shorter than that.
        """
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
    """How it is trained. `group_size` runs of a task are compared; `batch_size` tasks make one step."""

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100

    def __post_init__(self) -> None:
        """Raise TuneRefused for a value that makes no sense."""
        self.algorithm_type = _ALIASES.get(self.algorithm_type, self.algorithm_type)
        if self.algorithm_type not in ALGORITHMS:
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
        require_number(self, "learning_rate", 0, 1)
        if self.learning_rate == 0:
            raise TuneRefused("learning_rate must be above 0")


def require_whole(config: Any, name: str, *, least: int) -> None:
    """Raise TuneRefused unless the field of that name is a whole number of at least `least`."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TuneRefused(f"{_owner(config)}{name} must be a whole number of at least {least}, not {value!r}")


def require_type(config: Any, name: str, kinds: type | tuple[type, ...], words: str) -> None:
    """Raise TuneRefused unless the field of that name is one of a kind, which the words name, or None."""
    value = getattr(config, name)
    if value is not None and not isinstance(value, kinds):
        raise TuneRefused(f"{_owner(config)}{name} must be {words}, not {value!r}")


def require_monitor(name: str | None) -> None:
    """Raise TuneRefused for a `monitor_type` that there is not."""
    if name is not None and name not in MONITORS:
        raise TuneRefused(f"monitor_type: there is no {name!r} here; there are {', '.join(MONITORS)}")


def require_number(config: Any, name: str, least: float, most: float) -> None:
    """Raise TuneRefused unless the field of that name is a number in this range."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise TuneRefused(f"{_owner(config)}{name} must be a number from {least} to {most}, not {value!r}")


def _owner(config: Any) -> str:
    return f"{type(config).__name__}: " if type(config).__name__.endswith("Config") else ""
