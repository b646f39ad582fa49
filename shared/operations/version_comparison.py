"""Two versions side by side: how their replies were rewarded, how long they are, how they did on tasks."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from tuneloop.shared.evaluation.off_policy import OF_A_REPLAY
from tuneloop.shared.evaluation.samples import Sample
from tuneloop.shared.experience import Evaluator, VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.versions.evaluations import Evaluation
from tuneloop.shared.operations.version_report import Score, existing, score

#: With fewer sources of rewards on either side nothing is said of how far the difference may be off.
FEWEST = 4

_LEVEL = 0.95


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `replies` from `sources` that have nothing to do with each other: people, tasks, or runs.

    `error` is its standard error, None where there are fewer than two sources.
    """

    mean: float
    error: float | None
    replies: int
    sources: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The replies that one version alone has written; `tokens` is their length. A mean of nothing is None."""

    version: int
    state: VersionState
    replies: int
    reward: Mean | None
    tokens: Mean | None
    seconds_per_token: Mean | None


class ScorePair(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluator found of two versions; None where it did not look."""

    evaluator: Evaluator
    metric: str
    slice: str
    a: Score | None
    b: Score | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two versions. `difference` is b's mean reward less a's, and `interval`, Welch's, holds it in 95 of 100 cases.

    It is None with fewer than FEWEST sources of rewards on either side.
    """

    a: Side
    b: Side
    difference: float | None
    interval: tuple[float, float] | None
    evaluations: list[ScorePair]


def compared(ledger: Ledger, a: int, b: int) -> Comparison:
    """Two versions side by side. Raises VersionRefused if there is no such version."""
    versions = [existing(ledger, number) for number in (a, b)]
    one, other = (ledger.comparisons.figures(each.version, each.created_at) for each in versions)
    sides = [
        Side(
            version=version.version,
            state=version.state,
            replies=found.length.replies,
            reward=_mean(found.reward),
            tokens=_mean(found.length),
            seconds_per_token=_mean(found.latency),
        )
        for version, found in zip(versions, (one, other), strict=True)
    ]
    return Comparison(
        a=sides[0],
        b=sides[1],
        difference=other.reward.mean - one.reward.mean if one.reward.replies and other.reward.replies else None,
        interval=welch(one.reward, other.reward),
        evaluations=list(_pairs(ledger.evaluations.of_versions([a, b]), a, b)),
    )


def welch(one: Sample, other: Sample) -> tuple[float, float] | None:
    """The interval that holds the difference of the true means, the other's less the one's, in 95 of 100 cases."""
    if min(one.units, other.units) < FEWEST:
        return None
    first, second = (each.variance / each.replies for each in (one, other))
    difference = other.mean - one.mean
    if first + second == 0:
        return difference, difference
    freedom = (first + second) ** 2 / (first**2 / (one.units - 1) + second**2 / (other.units - 1))
    half = _quantile(freedom) * math.sqrt(first + second)
    return difference - half, difference + half


def _quantile(freedom: float) -> float:
    """Student's t at the upper end of the interval."""
    from scipy.special import stdtrit  # not before it is needed: every worker of the explorer would hold it

    return float(stdtrit(freedom, (1 + _LEVEL) / 2))


def _mean(sample: Sample) -> Mean | None:
    if not sample.replies:
        return None
    error = math.sqrt(sample.variance / sample.replies) if sample.units > 1 else None
    return Mean(mean=sample.mean, error=error, replies=sample.replies, sources=sample.units)


def _pairs(found: Sequence[Evaluation], a: int, b: int) -> Iterator[ScorePair]:
    by = {(each.evaluator, each.metric, each.slice, each.version): score(each) for each in found}
    for evaluator, metric, part in dict.fromkeys(key[:3] for key in by):
        if metric in OF_A_REPLAY:
            continue
        one, other = (by.get((evaluator, metric, part, version)) for version in (a, b))
        yield ScorePair(evaluator=evaluator, metric=metric, slice=part, a=one, b=other)
