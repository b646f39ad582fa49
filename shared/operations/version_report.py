"""Reports about the versions, one or two side by side, for the command line and the admin API alike."""

import math
from contextlib import suppress
from typing import Any

import msgspec

from tuneloop.shared.checkpoints import read_manifest
from tuneloop.shared.errors import CheckpointRejected, VersionRefused
from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.experience import Evaluator, VersionAction, VersionState
from tuneloop.shared.ledger.ledger import Ledger, Version, VersionReward
from tuneloop.shared.ledger.versions.comparison import Evaluation


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the list. Times are seconds since 1970; `trained_on` counts rows, `replies` choices."""

    version: int
    state: VersionState
    pinned: bool
    step: int
    trained_on: int
    replies: int
    rewarded: int
    mean_reward: float | None
    created_at: float
    served_at: float | None
    reason: str | None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a version, with the figures that decided it."""

    id: int
    version: int
    at: float
    action: VersionAction
    actor: str
    reason: str | None
    details: dict[str, Any]


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """How a version did on tasks that it was not trained on; `slice` is empty for all of them."""

    evaluator: Evaluator
    metric: str
    slice: str
    value: float
    deviation: float
    samples: int
    evaluated_at: float


class VersionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a version; `parent` None: the base model, or its checkpoint is gone."""

    version: VersionRow
    path: str
    manifest_sha256: str | None
    parent: int | None
    trained_on_replies_of: dict[int, int]
    evaluations: list[ScoreRow]
    events: list[EventRow]


def list_versions(ledger: Ledger) -> list[VersionRow]:
    rewards = {each.version: each for each in ledger.reports.rewards()}
    return [_row(each, rewards.get(each.version)) for each in reversed(ledger.versions.all())]


def require_version(ledger: Ledger, version: int) -> Version:
    existing = ledger.versions.get(version)
    if existing is None:
        raise VersionRefused(f"there is no version {version}")
    return existing


def report_version(ledger: Ledger, number: int) -> VersionReport:
    version = require_version(ledger, number)
    rewards = next((each for each in ledger.reports.rewards() if each.version == number), None)
    parent = None
    if version.manifest_sha256:
        with suppress(CheckpointRejected):
            parent = read_manifest(version.path).parent
    return VersionReport(
        version=_row(version, rewards),
        path=str(version.path),
        manifest_sha256=version.manifest_sha256,
        parent=parent,
        trained_on_replies_of=ledger.evaluations.trained_on(number),
        evaluations=[score_row(each) for each in ledger.evaluations.of_versions([number])],
        events=list_events(ledger, number),
    )


def list_events(ledger: Ledger, version: int | None = None, *, last: int | None = None) -> list[EventRow]:
    return [EventRow(**each._asdict()) for each in ledger.versions.events(version, last=last)]


def _row(version: Version, rewards: VersionReward | None) -> VersionRow:
    rewarded = rewards.rewarded if rewards else 0
    return VersionRow(
        version=version.version,
        state=version.state,
        pinned=version.pinned,
        step=version.step,
        trained_on=version.consumed,
        replies=rewards.replies if rewards else 0,
        rewarded=rewarded,
        mean_reward=rewards.reward_sum / rewarded if rewards and rewarded else None,
        created_at=version.created_at,
        served_at=version.served_at,
        reason=version.reason,
    )


def score_row(evaluation: Evaluation) -> ScoreRow:
    fields = evaluation._asdict()
    del fields["version"]
    return ScoreRow(**fields)


#: With fewer sources of rewards on either side no interval is given for the difference.
MIN_SOURCES = 4

_LEVEL = 0.95


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `replies` from independent `sources`; its standard `error`, None from fewer than two."""

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
    """One evaluator's figures of two versions; None where it has none."""

    evaluator: Evaluator
    metric: str
    slice: str
    a: ScoreRow | None
    b: ScoreRow | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two versions: b's mean reward less a's, with Welch's 95 % interval; None from too few sources."""

    a: Side
    b: Side
    difference: float | None
    interval: tuple[float, float] | None
    evaluations: list[ScorePair]


def compare_versions(ledger: Ledger, a: int, b: int) -> Comparison:
    """Two versions side by side. Raises VersionRefused if there is no such version."""
    versions = [require_version(ledger, number) for number in (a, b)]
    scores = {
        (each.evaluator, each.metric, each.slice, each.version): score_row(each)
        for each in ledger.evaluations.of_versions([a, b])
    }
    one, other = (ledger.comparisons.figures(each.version, each.created_at) for each in versions)
    sides = [
        Side(
            version=version.version,
            state=version.state,
            replies=figures.length.replies,
            reward=_mean(figures.reward),
            tokens=_mean(figures.length),
            seconds_per_token=_mean(figures.latency),
        )
        for version, figures in zip(versions, (one, other), strict=True)
    ]
    return Comparison(
        a=sides[0],
        b=sides[1],
        difference=other.reward.mean - one.reward.mean if one.reward.replies and other.reward.replies else None,
        interval=welch(one.reward, other.reward),
        evaluations=[
            ScorePair(evaluator=key[0], metric=key[1], slice=key[2], a=scores.get((*key, a)), b=scores.get((*key, b)))
            for key in dict.fromkeys(key[:3] for key in scores)
        ],
    )


def welch(one: SampleStatistics, other: SampleStatistics) -> tuple[float, float] | None:
    """The interval that holds the difference of the true means, the other's less the one's, in 95 of 100 cases."""
    if min(one.units, other.units) < MIN_SOURCES:
        return None
    first, second = (each.variance / each.replies for each in (one, other))
    difference = other.mean - one.mean
    if first + second == 0:
        return difference, difference
    freedom = (first + second) ** 2 / (first**2 / (one.units - 1) + second**2 / (other.units - 1))
    from scipy.special import stdtrit  # only when needed: every worker of the explorer would hold it in memory

    # Student's t at the upper end of the interval.
    half = float(stdtrit(freedom, (1 + _LEVEL) / 2)) * math.sqrt(first + second)
    return difference - half, difference + half


def _mean(sample: SampleStatistics) -> Mean | None:
    if not sample.replies:
        return None
    error = math.sqrt(sample.variance / sample.replies) if sample.units > 1 else None
    return Mean(mean=sample.mean, error=error, replies=sample.replies, sources=sample.units)
