"""Means with their intervals, and what came of a tuning run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev

_Z = NormalDist().inv_cdf(0.975)


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
    if all(reward in (0.0, 1.0) for reward in rewards):
        return Interval(mean, *_wilson(mean, count), count)
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = _student(count - 1) * stdev(rewards) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: from a table for few degrees of freedom, else by its expansion."""
    few = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
    if degrees in few:
        return few[degrees]
    z, n = _Z, float(degrees)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


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
