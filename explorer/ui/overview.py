"""The first page: is it training, did it help, what waits where and why."""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.experience import State, VersionState, steady_clock
from tuneloop.shared.ledger.facts import Facts, LedgerFacts, Rules
from tuneloop.shared.ledger.ledger import BatchRules, Ledger, Version
from tuneloop.shared.operations.diagnosis import diagnose, number
from tuneloop.shared.operations.doctor import MAX_DROP_REASONS, WAITS_FOR
from tuneloop.shared.operations.version_report import MIN_SOURCES, welch
from tuneloop.shared.outbox_status import OutboxStatus
from tuneloop.shared.settings.settings import Settings

#: Versions of which the curve shows the rewards, and the newest replies of each by which all figures here are made.
SHOWN, AMONG = 20, 2_000

#: The least age of counts that are made again, in seconds, and in times of what it takes to make them.
_INTERVAL_S, _INTERVAL_COUNTS = 5.0, 20.0


class RewardPoint(NamedTuple):
    """The rewards of a version; `low` and `high` are the ends of the mean's 95 % interval, None from one source."""

    version: int
    state: VersionState
    replies: int
    sources: int
    mean: float
    low: float | None
    high: float | None


class LedgerCounts:
    """The ledger's counts, made once for all who ask, and the rarer the longer they take."""

    def __init__(self, settings: Settings, ledger: Ledger, outbox: Callable[[], OutboxStatus]) -> None:
        self._settings, self._ledger, self._outbox = settings, ledger, outbox
        self._lock = asyncio.Lock()
        self._facts: Facts | None = None
        self._due = 0.0

    async def get(self) -> Facts:
        """The newest counts, and when they were made. Raises LedgerError."""
        async with self._lock:
            if self._facts is None or time.monotonic() >= self._due:
                began = time.monotonic()
                now, rules, batch_rules = steady_clock(), Rules.of(self._settings), BatchRules.of(self._settings)
                count = partial(self._ledger.reports.facts, batch_rules, drops=MAX_DROP_REASONS, batch=rules.least)
                found = await asyncio.to_thread(count)
                self._facts = Facts(now=now, rules=rules, outbox=self._outbox(), ledger=found)
                ended = time.monotonic()
                self._due = ended + max(_INTERVAL_S, _INTERVAL_COUNTS * (ended - began))
            return self._facts


def describe_waiting(facts: Facts) -> dict[str, Any]:
    ledger = facts.ledger or LedgerFacts(states={})
    return {
        "waits": [ledger.count(state)._asdict() | {"state": state, "what": what} for state, what in WAITS_FOR.items()],
        "counts": {state.value: ledger.count(state).rows for state in State},
        "reasons": diagnose(facts),
        "facts": ledger,
        "counted_at": facts.now,
    }


def build_overview(ledger: Ledger) -> dict[str, Any]:
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
        # With a version after every step most neighbours have hardly a reply: the base model has some.
        known = {each.version for each in points if each.sources >= MIN_SOURCES}
        told = max((each.version for each in [*others[1:], champion] if each.version in known), default=0)
        before = others[-1].version
        if told and (told != champion.version or before not in known):
            before = others[0].version
        verdict = compare_versions_by_reward(ledger, told or champion.version, before)
        if 0 < told < champion.version:
            basis = f"{verdict.basis}; version {champion.version} serves now, and has too few rewarded replies yet"
            verdict = verdict._replace(basis=basis)
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


def reward_points(ledger: Ledger, versions: list[Version]) -> list[RewardPoint]:
    points = []
    for version in reversed(versions):
        found = newest_rewards(ledger, version.version)
        if found.replies:
            ends = found.interval or (None, None)
            points.append(RewardPoint(version.version, version.state, found.replies, found.units, found.mean, *ends))
        if len(points) == SHOWN:
            break
    return points[::-1]


def chart_of(points: list[RewardPoint]) -> dict[str, Any]:
    data = [[getattr(each, name) for each in points] for name in ("version", "low", "high", "mean")]
    return {"kind": "interval", "x": "version", "y": "reward", "data": data}


def compare_versions_by_reward(ledger: Ledger, version: int, before: int) -> "RewardVerdict":
    return compare_rewards(version, newest_rewards(ledger, version), before, newest_rewards(ledger, before))


def newest_rewards(ledger: Ledger, version: int) -> SampleStatistics:
    """The rewards by which all pages judge a version: two pages that count others would give it two means."""
    return ledger.reward_history.newest(version, among=AMONG)


Tone = Literal["better", "worse", "open"]


class RewardVerdict(NamedTuple):
    tone: Tone
    sentence: str
    basis: str


def compare_rewards(
    version: int, rewards: SampleStatistics, before: int, rewards_before: SampleStatistics
) -> "RewardVerdict":
    """What the rewards of two versions say. The interval holds the true difference in 95 of 100 cases."""
    interval, other = welch(rewards_before, rewards), before or "the base model"
    if interval is None:
        missing = [
            f"version {each} has {found.replies} rewarded replies from {found.units} people, tasks or runs"
            for each, found in ((version, rewards), (before, rewards_before))
            if found.units < MIN_SOURCES
        ]
        return RewardVerdict(
            "open",
            f"Whether version {version} is better than {other} is not known yet",
            f"{' and '.join(missing)}; at least {MIN_SOURCES} are needed of each",
        )
    low, high = interval
    difference, half = rewards.mean - rewards_before.mean, (high - low) / 2
    basis = (
        f"{number(rewards.replies, 'rewarded reply').replace('replys', 'replies')} of version {version} (mean "
        f"{rewards.mean:.3g}) and {rewards_before.replies} of version {before} (mean {rewards_before.mean:.3g}), from "
        f"{rewards.units} and {rewards_before.units} independent people, tasks or runs; 95 % interval"
    )
    if low > 0:
        return RewardVerdict(
            "better", f"Version {version} earns {_pair(difference, half)} more than {other} on live reward", basis
        )
    if high < 0:
        return RewardVerdict(
            "worse", f"Version {version} earns {_pair(-difference, half)} less than {other} on live reward", basis
        )
    sentence = (
        f"No difference between versions {version} and {before} is shown yet: {_pair(difference, half)} on live reward"
    )
    return RewardVerdict("open", sentence, basis)


def _pair(difference: float, half: float) -> str:
    """A difference and half of its interval, both to the digit that the interval leaves meaningful."""
    digits = next((digits for digits in range(5) if half >= 10.0**-digits), 5) if half > 0 else 2
    digits = max(digits, 2)
    return f"{difference:.{digits}f} ± {half:.{digits}f}"
