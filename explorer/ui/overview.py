"""The first page: is it training, did it help, what waits where and why."""

import statistics
from typing import Any, NamedTuple

from tuneloop.explorer.ui.ledger_counts import LedgerCounts
from tuneloop.explorer.ui.reading.verdict import RewardVerdict, compare_rewards
from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.experience import State, VersionState
from tuneloop.shared.ledger.facts import LedgerFacts
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.operations.diagnosis import diagnose
from tuneloop.shared.operations.doctor import WAITS_FOR

#: Versions of which the curve shows the rewards, and the newest replies of each by which it does.
SHOWN, AMONG = 20, 500

#: The newest replies of each of the two versions that the verdict is about.
AMONG_OF_TWO = 2_000

#: Half of a 95 % interval, in standard errors.
_HALF = 1.96


class RewardPoint(NamedTuple):
    """The rewards of a version; `low` and `high` are the ends of the mean's 95 % interval, None from one source."""

    version: int
    state: VersionState
    replies: int
    mean: float
    low: float | None
    high: float | None


def find_waiting(counts: LedgerCounts) -> dict[str, Any] | None:
    """What waits where, and why no step is happening; None while that is counted for the first time."""
    facts, counted_at, counting = counts.get()
    if facts is None:
        return None
    ledger = facts.ledger or LedgerFacts(states={})
    return {
        "waits": [ledger.count(state)._asdict() | {"state": state, "what": what} for state, what in WAITS_FOR.items()],
        "counts": {state.value: ledger.count(state).rows for state in State},
        "reasons": diagnose(facts),
        "facts": ledger,
        "counted_at": counted_at,
        "counting": counting,
    }


def build_overview(ledger: Ledger) -> dict[str, Any]:
    """What the page shows of the versions."""
    versions = ledger.versions.all()
    champion = next((each for each in versions if each.state is VersionState.CHAMPION), None)
    tried = next((each for each in versions if each.state is VersionState.CANARY), None)
    waiting = next((each for each in reversed(versions) if each.state is VersionState.CANDIDATE), None)
    points = reward_points(ledger, versions)
    served = [each for each in versions if each.served_at is not None]
    others = [each for each in served if champion is not None and each.version < champion.version]
    if champion is None or len(served) < 2:
        verdict = RewardVerdict(
            "open",
            "Only the base model has been served: there is nothing to compare yet",
            "the first version is trained once enough replies are rewarded and committed",
        )
    elif not others:
        verdict = RewardVerdict(
            "open", f"Version {champion.version} serves again: newer ones were taken back", "see Versions"
        )
    else:
        verdict = compare_versions_by_reward(ledger, champion.version, others[-1].version)
    delays = ledger.reward_history.feedback_to_served(champion.version) if champion else []
    return {
        "verdict": verdict,
        "canary_verdict": champion and tried and compare_versions_by_reward(ledger, tried.version, champion.version),
        "champion": champion,
        "canary": tried,
        "candidate": waiting,
        "newest": versions[-1] if versions else None,
        "points": points,
        "among": AMONG,
        "chart": chart_of(points),
        "delay": statistics.median(delays) if delays else None,
        "slowest": delays[-1] if delays else None,
        "alarms": ledger.alarms.all(),
    }


def reward_points(ledger: Ledger, versions: list[Version], *, shown: int = SHOWN) -> list[RewardPoint]:
    """The rewards of the newest versions that have some, oldest first."""
    points = []
    for version in reversed(versions):
        found = ledger.reward_history.newest(version.version, among=AMONG)
        if found.replies:
            half = _HALF * (found.variance / found.replies) ** 0.5 if found.units > 1 else None
            ends = (None, None) if half is None else (found.mean - half, found.mean + half)
            points.append(RewardPoint(version.version, version.state, found.replies, found.mean, *ends))
        if len(points) == shown:
            break
    return points[::-1]


def chart_of(points: list[RewardPoint]) -> dict[str, Any]:
    """The points as the page's script draws them."""
    data = [[getattr(each, name) for each in points] for name in ("version", "low", "high", "mean")]
    return {"kind": "interval", "x": "version", "y": "reward", "data": data}


def compare_versions_by_reward(ledger: Ledger, version: int, before: int) -> RewardVerdict:
    """Whether a version earns more than an earlier one, by the newest replies of both."""

    def rewards(of: int) -> SampleStatistics:
        return ledger.reward_history.newest(of, among=AMONG_OF_TWO)

    return compare_rewards(version, rewards(version), before, rewards(before))
