"""The settings of what is watched: `monitor` in the YAML."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tuneloop.shared.settings.types import (
    AboveOne,
    Fraction,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Seconds,
    Section,
    Share,
    UpToHalf,
)


def _a_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression of Python's ({error})") from None
    return value


def _a_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError("must be package.module:name")
    return value


def _a_receiver(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
        raise ValueError("must be the http or https URL of an OTLP receiver, such as http://localhost:4318")
    return value


FunctionName = Annotated[str, AfterValidator(_a_function)]
Pattern = Annotated[str, AfterValidator(_a_pattern)]

_REFUSALS = (
    "I.?m sorry",
    "I am sorry",
    "I can.?t help",
    "I can.?t assist",
    "I cannot",
    "I.?m unable to",
    "I am unable to",
    "I.?m not able to",
    "as an AI",
    "对不起",
    "抱歉",
    "我不能",
    "我无法",
    "作为一个人工智能",
)


class EvaluationSettings(Section):
    """Tasks with known answers that are never trained on; without a `path` nothing is evaluated."""

    path: Path | None = None
    every: Positive = 20
    judge: Literal["exact", "contains", "regex", "function", "model"] = "contains"
    function: FunctionName | None = None
    most_tokens: Positive = 256
    samples: Positive | None = None


#: The alarms that say that the feedback cannot be trusted, or that the model is worse for it.
SUSPECT = frozenset({"reward_hack", "reward_jump", "extreme_rewards", "rater_outliers", "degraded"})


class DriftSettings(Section):
    """When a monitor raises its alarm; a threshold of null switches it off."""

    action: Literal["report", "suspect", "hold"] = "suspect"
    baseline: Positive = 20
    window: Positive = 20
    reward_rise: NotNegativeReal | None = 0.05
    evaluation_fall: NotNegativeReal = 0.1
    evaluation_window: Positive = 200
    reply_length: AboveOne | None = 2.0
    entropy: AboveOne | None = 3.0
    kl: PositiveReal | None = 0.5
    kl_every: Positive = 20
    refusals: Fraction | None = 0.1
    refusal_patterns: tuple[Pattern, ...] = _REFUSALS
    tool_errors: Fraction | None = 0.1
    replies: Positive = 256
    single_rater: Share | None = 0.8
    rater_events: Positive = 200
    reward_jump: Share | None = 0.25
    extreme_rewards: Fraction | None = 0.05
    rater_outliers: Fraction | None = 0.2
    degraded: Fraction | None = 0.2

    def holds(self, alarm: str) -> bool:
        """Whether the alarm of this name keeps new versions from being served."""
        return self.action == "hold" or (self.action == "suspect" and alarm in SUSPECT)

    @property
    def refusals_found(self) -> list[re.Pattern[str]]:
        """What is looked for in a reply to see whether it refuses; upper and lower case are alike."""
        return [re.compile(each, re.IGNORECASE) for each in self.refusal_patterns]


class MonitorSettings(Section):
    """Where curves are written, and what is watched."""

    monitor_type: Literal["tensorboard", "wandb", "mlflow"] = "tensorboard"
    otlp_url: Annotated[str, AfterValidator(_a_receiver)] | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    drift: DriftSettings = DriftSettings()

    def contradictions(self) -> Iterator[str]:
        """What in here does not fit together, a sentence each."""
        if (self.evaluation.judge == "function") != (self.evaluation.function is not None):
            yield (
                "monitor.evaluation.function: goes with monitor.evaluation.judge: function; write both, the one as"
                " package.module:name, or neither"
            )
        if self.evaluation.path is not None and self.drift.evaluation_window < self.evaluation.every:
            yield (
                f"monitor.drift.evaluation_window: {self.drift.evaluation_window} steps hold no two evaluations, of"
                f" which there is one every {self.evaluation.every}; raise it, or lower monitor.evaluation.every"
            )


#: The traffic that a version which is being tried gets, where the settings do not say.
SHARES = {"canary": 0.1, "shadow": 0.1, "ab": 0.5}


ErrorRate = Annotated[float, Field(gt=0, lt=0.5)]


class ReplaySettings(Section):
    """A share of the traffic that is held out of all training, and what a candidate must earn on it; 0: none is."""

    share: UpToHalf = 0.0
    rows: Positive = 1000
    margin: NotNegativeReal = 0.05
    slice_margin: NotNegativeReal = 0.1


class GateSettings(Section):
    """What a candidate must show before it answers anybody; a bare word is its `mode`."""

    mode: Literal["off", "report", "block"] = "off"
    margin: Fraction = 0.02
    slice_margin: Fraction = 0.05
    kl: PositiveReal | None = None
    reply_length: AboveOne | None = 2.0
    refusals: Fraction | None = 0.1
    format: Fraction | None = 0.1
    replay: ReplaySettings = ReplaySettings()

    @property
    def replays(self) -> bool:
        """Whether a candidate is compared on replies that were held out."""
        return self.mode != "off" and self.replay.share > 0

    def contradictions(self, *, tasks: bool) -> Iterator[str]:
        """What does not fit together, a sentence each; `tasks`: whether there are any."""
        if self.mode == "off" or tasks:
            return
        if not self.replays:
            yield (
                f"gate.mode: {self.mode} needs tasks to try a version on; name their file in monitor.evaluation.path,"
                " or hold traffic out with gate.replay.share, or write gate: off"
            )
        elif self.kl is not None:
            yield "gate.kl: is measured on tasks; name their file in monitor.evaluation.path, or leave it away"

    @model_validator(mode="before")
    @classmethod
    def _a_word(cls, value: Any) -> Any:
        # YAML takes a bare `off` for false.
        if value is False:
            return {"mode": "off"}
        if isinstance(value, str):
            return {"mode": value}
        if isinstance(value, dict) and value.get("mode") is False:
            return value | {"mode": "off"}
        return value


class RolloutSettings(Section):
    """How the traffic goes over to a new version, and what brings it back."""

    mode: Literal["all", "rolling", "canary", "shadow", "ab"] = "all"
    share: Share | None = None
    window: Seconds = 3600.0
    rewards: Positive = 50
    error: ErrorRate = 0.05
    undecided: Literal["promote", "roll_back"] = "roll_back"
    failures: Fraction | None = 0.02
    latency: AboveOne | None = 1.5
    reply_length: AboveOne | None = 2.0
    refusals: Fraction | None = 0.1

    @property
    def tries(self) -> bool:
        """Whether a new version first stands beside the old one."""
        return self.mode in SHARES

    @property
    def tried_share(self) -> float:
        """The part of the traffic that a version which is being tried gets, or gets copies of."""
        return self.share if self.share is not None else SHARES.get(self.mode, 1.0)

    def contradictions(self) -> Iterator[str]:
        """What in here does not fit together, a sentence each."""
        if self.share is not None and not self.tries:
            yield f"rollout.share: means nothing with rollout.mode: {self.mode}; leave it away, or write canary or ab"
        if self.share == 1.0 and self.mode in {"canary", "ab"}:
            yield "rollout.share: 1.0 leaves nothing to compare with; write less, or rollout.mode: all"
