"""The settings of what is watched: `monitor` in the YAML."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from shared.config_kinds import AboveOne, Fraction, NotNegativeReal, Positive, PositiveReal, Section, Share


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


class Evaluation(Section):
    """Tasks with known answers that are never trained on; without a `path` nothing is evaluated."""

    path: Path | None = None
    every: Positive = 20
    judge: Literal["exact", "contains", "regex", "function", "model"] = "contains"
    function: FunctionName | None = None
    most_tokens: Positive = 256
    samples: Positive | None = None


class Drift(Section):
    """When a monitor raises its alarm; a threshold of null switches it off."""

    action: Literal["report", "hold"] = "report"
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

    @property
    def refusals_found(self) -> list[re.Pattern[str]]:
        """What is looked for in a reply to see whether it refuses; upper and lower case are alike."""
        return [re.compile(each, re.IGNORECASE) for each in self.refusal_patterns]


class Monitor(Section):
    """Where curves are written, and what is watched."""

    monitor_type: Literal["tensorboard"] = "tensorboard"
    evaluation: Evaluation = Evaluation()
    drift: Drift = Drift()

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
