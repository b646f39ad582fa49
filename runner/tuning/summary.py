"""Means with their intervals, and what came of a tuning run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from tuneloop.runner.collection.intervals import mean_of, share_of


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of `count` rewards, and a 95 % confidence interval of it; one of a single reward is unbounded."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.count}"


def interval_of(rewards: Sequence[float]) -> Interval:
    """Student's interval; Wilson's where all rewards are 0 or 1. Raises ValueError for no rewards."""
    if not rewards:
        raise ValueError("there is no reward to average")
    count, mean = len(rewards), fmean(rewards)
    is_share = all(reward in (0.0, 1.0) for reward in rewards)
    found = share_of(rewards.count(1.0), count) if is_share else mean_of(rewards)
    if found is None or found.low is None or found.high is None:
        return Interval(mean, -math.inf, math.inf, count)
    return Interval(mean, found.low, found.high, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step: its rollouts' reward, how many runs failed, how long it took, and the version after it."""

    step: int
    reward: Interval | None
    runs: int
    failed: int
    seconds: float
    version: int
    published: bool
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """How a version did on the evaluation's tasks; `step` 0 is before training."""

    step: int
    version: int
    reward: Interval | None
    failed: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TuneResult:
    """What came of `tune()`. `before` and `after` are of the evaluation; without one, of the first and last step."""

    folder: Path
    tensorboard: Path
    checkpoints: Path | None
    steps: int = 0
    version: int = 0
    before: Interval | None = None
    after: Interval | None = None
    evaluations: list[EvaluationReport] = field(default_factory=list)
    history: list[StepReport] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
