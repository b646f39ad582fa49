"""Versions without a decision yet, and the pinned one: since when, and why."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tuneloop.shared.evaluation.gate import evaluator_of, same_tasks
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import VersionEvent
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.settings.settings import Settings


class OpenVersion(NamedTuple):
    """A version that is pinned, serves as canary beside the champion, or waits to be served."""

    version: int
    how: Literal["pinned", "canary", "waits"]
    since: float
    why: str


def find_open_versions(ledger: Ledger, settings: Settings) -> tuple[OpenVersion, ...]:
    """The pinned version, the canary and the waiting candidate; nothing is changed."""
    return tuple(_open_versions(ledger, settings))


def _open_versions(ledger: Ledger, settings: Settings) -> Iterator[OpenVersion]:
    pinned, canary, candidate = ledger.versions.pinned_version(), ledger.versions.canary(), ledger.versions.candidate()
    holding = _holding_alarms(ledger)
    if pinned:
        begun = _last(ledger, pinned, VersionAction.PINNED)
        yield OpenVersion(pinned.version, "pinned", begun.at, _actor_and_reason(begun))
    if canary:
        begun = _last(ledger, canary, VersionAction.CANARY)
        why = "; ".join([_actor_and_reason(begun), *(f"not promoted while {each}" for each in holding)])
        yield OpenVersion(canary.version, "canary", begun.at, why)
    if candidate:
        reasons = [
            *([f"version {canary.version} is decided about first"] if canary else []),
            *([f"version {pinned.version} is pinned"] if pinned else []),
            *holding,
            *_at_the_gate(ledger, settings, candidate),
        ]
        why = "; ".join(reasons) or "the explorer has not taken it up yet; if that lasts, its log says why"
        yield OpenVersion(candidate.version, "waits", candidate.created_at, why)


def _holding_alarms(ledger: Ledger) -> list[str]:
    return [
        f"the alarm {each.name} holds, since {moment(each.raised_at)}" for each in ledger.alarms.all() if each.holds
    ]


def _at_the_gate(ledger: Ledger, settings: Settings, candidate: Version) -> Iterator[str]:
    """What the gate lacks to let the candidate pass or to reject it."""
    evaluator, mode = evaluator_of(settings), settings.gate.mode
    # A gate that does not block waits only for engines: the trainer evaluates in its own time.
    if mode == "off" or (mode == "report" and evaluator is Evaluator.TRAINER):
        return
    champion = ledger.versions.champion()
    new, old = (ledger.evaluations.of(each.version, evaluator) for each in (candidate, champion))
    if same_tasks(new, old):
        return
    event = _find(ledger, candidate, VersionAction.EVALUATED)
    if not new:
        lacks = f"at the gate, until the {evaluator} has evaluated it"
    elif not old:
        lacks = f"at the gate, until the {evaluator} has evaluated the champion, too"
    else:
        lacks = f"at the gate: the {evaluator} has evaluated it and the champion on different tasks"
    # With figures the event is of an evaluation, without them it says why there is none.
    yield f"{lacks} ({event.reason})" if event and event.reason and not event.details else lacks


def _last(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent:
    event = _find(ledger, version, action)
    assert event is not None  # written in the transaction that did it
    return event


def _find(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent | None:
    return next((each for each in reversed(ledger.versions.events(version.version)) if each.action is action), None)


def _actor_and_reason(event: VersionEvent) -> str:
    return f"by {event.actor}{f': {event.reason}' if event.reason else ''}"
