"""Versions without a decision yet, and the pinned one: since when, and why."""

from collections.abc import Iterator
from typing import NamedTuple

from tuneloop.shared.evaluation.gate import evaluator_of, same_tasks
from tuneloop.shared.experience import Evaluator, VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import VersionEvent
from tuneloop.shared.operations.diagnosis import moment
from tuneloop.shared.settings.settings import Settings


class OpenVersion(NamedTuple):
    """A version that is `pinned`, serves as `canary` beside the champion, or `waits` to be served."""

    version: int
    how: str
    since: float
    why: str


def find_open_versions(ledger: Ledger, settings: Settings) -> tuple[OpenVersion, ...]:
    """The pinned version, the canary and the waiting candidate; nothing is changed."""
    pinned, canary, candidate = ledger.versions.pinned_version(), ledger.versions.canary(), ledger.versions.candidate()
    holding = [
        f"the alarm {each.name} holds, since {moment(each.raised_at)}"
        for each in ledger.alarms.all()
        if each.holds and not each.policy
    ]
    found = []
    for version, how, action in ((pinned, "pinned", VersionAction.PINNED), (canary, "canary", VersionAction.CANARY)):
        if version is not None:
            begun = _find(ledger, version, action)
            assert begun is not None  # written in the transaction that did it
            why = [f"by {begun.actor}{f': {begun.reason}' if begun.reason else ''}"]
            why += [f"not promoted while {each}" for each in holding] if version is canary else []
            found.append(OpenVersion(version.version, how, begun.at, "; ".join(why)))
    if candidate:
        reasons = [
            *([f"version {canary.version} is decided about first"] if canary else []),
            *([f"version {pinned.version} is pinned"] if pinned else []),
            *holding,
            *_at_the_gate(ledger, settings, candidate),
        ]
        lasting = "the explorer has not taken it up yet; if that lasts, its log says why"
        found.append(OpenVersion(candidate.version, "waits", candidate.created_at, "; ".join(reasons) or lasting))
    return tuple(found)


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


def _find(ledger: Ledger, version: Version, action: VersionAction) -> VersionEvent | None:
    return next((each for each in reversed(ledger.versions.events(version.version)) if each.action is action), None)
