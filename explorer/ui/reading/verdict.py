"""Whether the newest weights are better than those before them, in one sentence. Pure."""

from typing import Literal, NamedTuple

from tuneloop.shared.evaluation.samples import SampleStatistics
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.operations.version_comparison import MIN_SOURCES, welch

Tone = Literal["better", "worse", "open"]


class RewardVerdict(NamedTuple):
    """What can be said, and what it rests on."""

    tone: Tone
    sentence: str
    basis: str


def compare_rewards(
    version: int, rewards: SampleStatistics, before: int, rewards_before: SampleStatistics
) -> RewardVerdict:
    """What the rewards of two versions say. The interval holds the true difference in 95 of 100 cases."""
    interval = welch(rewards_before, rewards)
    if interval is None:
        missing = [
            f"version {each} has {found.replies} rewarded replies from {found.units}"
            for each, found in ((version, rewards), (before, rewards_before))
            if found.units < MIN_SOURCES
        ]
        return RewardVerdict(
            "open",
            f"Whether version {version} is better than {before} cannot be told yet",
            f"{' and '.join(missing)}; rewards from at least {MIN_SOURCES} people, tasks or runs are needed of each",
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
            "better", f"Version {version} earns {_pair(difference, half)} more than {before} on live reward", basis
        )
    if high < 0:
        return RewardVerdict(
            "worse", f"Version {version} earns {_pair(-difference, half)} less than {before} on live reward", basis
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
