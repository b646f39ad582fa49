"""Versions that nobody has decided about yet, and one that is pinned: since when they stand so, and why."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tuneloop.shared.evaluation.gate import evaluator_of, same_tasks
from tuneloop.shared.evaluation.off_policy import is_beside
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.events import VersionEvent
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.settings.settings import Settings


class Standing(NamedTuple):
    """How a version stands: it is pinned, is tried beside the champion, or waits to be served."""

    version: int
    how: Literal["pinned", "tried", "waits"]
    since: float
    why: str


def undecided(ledger: Ledger, settings: Settings) -> tuple[Standing, ...]:
    """What is pinned, what is tried, what waits; nothing is changed."""
    return tuple(_standings(ledger, settings))


def _standings(ledger: Ledger, settings: Settings) -> Iterator[Standing]:
    pinned, canary, candidate = ledger.versions.pinned(), ledger.versions.canary(), ledger.versions.candidate()
    held = _held(ledger)
    if pinned:
        begun = _last(ledger, pinned, VersionAction.PINNED)
        yield Standing(pinned.version, "pinned", begun.at, _said(begun))
    if canary:
        begun = _last(ledger, canary, VersionAction.CANARY)
        why = "; ".join([_said(begun), *(f"not promoted while {each}" for each in held)])
        yield Standing(canary.version, "tried", begun.at, why)
    if candidate:
        reasons = [
            *([f"version {canary.version} is tried first"] if canary else []),
            *([f"version {pinned.version} is pinned"] if pinned else []),
            *held,
            *_at_the_gate(ledger, settings, candidate),
        ]
        why = "; ".join(reasons) or "the explorer has not taken it up yet; if that lasts, its log says why"
        yield Standing(candidate.version, "waits", candidate.created_at, why)


def _held(ledger: Ledger) -> list[str]:
    return [
        f"the alarm {each.name} holds, since {moment(each.raised_at)}" for each in ledger.alarms.all() if each.holds
    ]


def _at_the_gate(ledger: Ledger, settings: Settings, candidate: Version) -> Iterator[str]:
    """What the gate lacks to let the candidate pass or to reject it."""
    evaluator, mode = evaluator_of(settings), settings.gate.mode
    # Without being blocked it waits only for engines: the trainer evaluates when it comes to it.
    if mode == "off" or (mode == "report" and evaluator is Evaluator.TRAINER):
        return
    champion = ledger.versions.champion()
    new, old = (ledger.evaluations.of(each.version, evaluator) for each in (candidate, champion))
    beside = not settings.gate.replays or is_beside(new, champion.version)
    if same_tasks(new, old) and beside:
        return
    said = _find(ledger, candidate, VersionAction.EVALUATED)
    if not new:
        lacks = f"at the gate, until the {evaluator} has evaluated it"
    elif not old:
        lacks = f"at the gate, until the {evaluator} has evaluated the champion, too"
    elif not beside:
        lacks = f"at the gate, until the {evaluator} has evaluated it beside version {champion.version}"
    else:
        lacks = f"at the gate: the {evaluator} has evaluated it and the champion on different tasks"
    # With figures it tells of an evaluation, without them of what there is none for.
    yield f"{lacks} ({said.reason})" if said and said.reason and not said.details else lacks


def _last(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent:
    found = _find(ledger, version, action)
    assert found is not None  # written in the transaction that did it
    return found


def _find(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent | None:
    return next((each for each in reversed(ledger.versions.events(version.version)) if each.action is action), None)


def _said(event: VersionEvent) -> str:
    return f"by {event.actor}{f': {event.reason}' if event.reason else ''}"
