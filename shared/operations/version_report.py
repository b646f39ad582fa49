"""What people are told of the versions, by the command line and by the admin API alike."""

from pathlib import Path
from typing import Any

import msgspec

from tuneloop.shared.checkpoint import read_manifest
from tuneloop.shared.errors import CheckpointRejected, VersionRefused
from tuneloop.shared.experience import Evaluator, VersionAction, VersionState
from tuneloop.shared.ledger.ledger import Ledger, Version, VersionReward
from tuneloop.shared.ledger.versions.evaluations import Evaluation
from tuneloop.shared.ledger.versions.events import VersionEvent


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the list. Times are seconds since 1970; `trained_on` counts rows, `replies` choices.

    `reason` says why it must not be served.
    """

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


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a version, with the figures that decided it."""

    id: int
    version: int
    at: float
    action: VersionAction
    actor: str
    reason: str | None
    details: dict[str, Any]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How a version did on tasks that it was not trained on; `slice` is empty for all of them."""

    evaluator: Evaluator
    metric: str
    slice: str
    value: float
    deviation: float
    samples: int
    evaluated_at: float


class VersionStory(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a version. `parent` is None for the base model, and where the checkpoint is gone.

    `trained_on_replies_of` counts its rows by the version that sampled them.
    """

    version: VersionRow
    path: str
    manifest_sha256: str | None
    parent: int | None
    trained_on_replies_of: dict[int, int]
    evaluations: list[Score]
    events: list[Event]


def listed(ledger: Ledger) -> list[VersionRow]:
    """All versions, the newest first."""
    rewards = {each.version: each for each in ledger.reports.rewards()}
    return [_row(each, rewards.get(each.version)) for each in reversed(ledger.versions.all())]


def existing(ledger: Ledger, version: int) -> Version:
    """That version. Raises VersionRefused if there is none."""
    found = ledger.versions.get(version)
    if found is None:
        raise VersionRefused(f"there is no version {version}")
    return found


def story(ledger: Ledger, number: int) -> VersionStory:
    """All that is known of a version. Raises VersionRefused if there is none of that number."""
    version = existing(ledger, number)
    said = next((each for each in ledger.reports.rewards() if each.version == number), None)
    return VersionStory(
        version=_row(version, said),
        path=str(version.path),
        manifest_sha256=version.manifest_sha256,
        parent=_parent(version.path) if version.manifest_sha256 else None,
        trained_on_replies_of=ledger.evaluations.trained_on(number),
        evaluations=[score(each) for each in ledger.evaluations.of_versions([number])],
        events=events(ledger, number),
    )


def events(ledger: Ledger, version: int | None = None, *, last: int | None = None) -> list[Event]:
    """What happened to the versions, or to one, oldest first; only the `last` so many."""
    return [_event(each) for each in ledger.versions.events(version, last=last)]


def _row(version: Version, said: VersionReward | None) -> VersionRow:
    rewarded = said.rewarded if said else 0
    return VersionRow(
        version=version.version,
        state=version.state,
        pinned=version.pinned,
        step=version.step,
        trained_on=version.consumed,
        replies=said.replies if said else 0,
        rewarded=rewarded,
        mean_reward=said.reward_sum / rewarded if said and rewarded else None,
        created_at=version.created_at,
        served_at=version.served_at,
        reason=version.reason,
    )


def _event(event: VersionEvent) -> Event:
    return Event(**event._asdict())


def score(found: Evaluation) -> Score:
    """A row of `evaluations` without its version."""
    told = found._asdict()
    del told["version"]
    return Score(**told)


def _parent(path: Path) -> int | None:
    try:
        return read_manifest(path).parent
    except CheckpointRejected:
        return None
