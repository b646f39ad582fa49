"""Reports about the versions, for the command line and the admin API alike."""

from contextlib import suppress
from typing import Any

import msgspec

from tuneloop.shared.checkpoints import read_manifest
from tuneloop.shared.errors import CheckpointRejected, VersionRefused
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
