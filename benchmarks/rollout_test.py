"""How many rewards a rollout needs to see a difference, and how often it sees one where there is none.

    .venv/bin/python -m benchmarks.rollout_test [--trials 2000] [--power 200]

Each trial draws rewards for the champion and for the version that is tried, divides them as the rollout would, and asks
for the decision after every ten rewarded replies. Rewards are 0 or 1, or normal with a deviation of 1; `users` are
sticky, send ten requests each, and differ from each other by 0.3.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from tests.explorer.rollouts import Draw, Traffic, Trial, bernoulli, normal, trials
from tuneloop.explorer.versions.trial import decide
from tuneloop.shared.evaluation.samples import Figures, SampleStatistics, spread
from tuneloop.shared.settings.versions import RolloutSettings

CANARY, AB = RolloutSettings(mode="canary"), RolloutSettings(mode="ab")

SAME: dict[str, Draw] = {
    "0 or 1, mean 0.02": bernoulli(0.02),
    "0 or 1, mean 0.6": bernoulli(0.6),
    "0 or 1, mean 0.95": bernoulli(0.95),
    "normal": normal(0.0),
    "log-normal, sigma 1.5": lambda rng, count: rng.lognormal(0.0, 1.5, count),
    "Student, 3 degrees": lambda rng, count: rng.standard_t(3, count),
}

DIFFERENT: dict[str, Traffic] = {
    "0.6 → 0.05 (scrambled)": Traffic(bernoulli(0.6), bernoulli(0.05)),
    "0.6 → 0.4": Traffic(bernoulli(0.6), bernoulli(0.4)),
    "0.6 → 0.5": Traffic(bernoulli(0.6), bernoulli(0.5)),
    "0.6 → 0.65": Traffic(bernoulli(0.6), bernoulli(0.65)),
    "0.6 → 0.7": Traffic(bernoulli(0.6), bernoulli(0.7)),
    "0.6 → 0.8": Traffic(bernoulli(0.6), bernoulli(0.8)),
    "normal, +0.1": Traffic(normal(0.0), normal(0.1)),
    "normal, +0.3": Traffic(normal(0.0), normal(0.3)),
    "normal, +1": Traffic(normal(0.0), normal(1.0)),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=2000, help="rollouts of versions that are the same, of each kind")
    parser.add_argument("--power", type=int, default=200, help="rollouts of versions that differ, of each kind")
    options = parser.parse_args()
    print("| the same rewards | mode | promoted | worse | either |\n|---|---|---|---|---|")
    for name, rollout, ends in _same(options.trials):
        better = sum(end == "promote" for end in ends)
        worse = sum(end == "worse" for end in ends)
        print(
            _row(name, rollout.mode, *(f"{100 * each / len(ends):.1f} %" for each in (better, worse, better + worse)))
        )
    print(
        "\n| champion → tried | mode | decided | rewards of the tried, median (90 %) | in all |\n|---|---|---|---|---|"
    )
    for name, traffic in DIFFERENT.items():
        for rollout, rewards in ((CANARY, 40_000), (AB, 10_000)):
            print(_row(name, rollout.mode, *_power(list(trials(options.power, rollout, traffic, rewards=rewards)))))


def _same(count: int) -> Iterator[tuple[str, RolloutSettings, Sequence[str]]]:
    for rollout, rewards in ((CANARY, 2000), (AB, 1000)):
        for name, draw in SAME.items():
            ends = [each.decision for each in trials(count, rollout, Traffic(draw, draw), rewards=rewards)]
            yield name, rollout, [_end(end.action, end.reason) for end in ends]
        yield (
            "0 or 1, mean 0.5, users",
            rollout,
            [_of_users(seed, rollout, users=rewards // 10) for seed in range(count)],
        )


def _of_users(seed: int, rollout: RolloutSettings, users: int) -> str:
    """A rollout with users who differ, each of whom meets one version only; looked at after each user."""
    rng = np.random.default_rng([seed, users])
    rewards = rng.random((users, 10)) < np.clip(rng.normal(0.5, 0.3, (users, 1)), 0.0, 1.0)
    is_tried = rng.random(users) < rollout.tried_share
    for seen in range(2, users + 1):
        mine, others = (_cluster(rewards[:seen][is_tried[:seen] == of]) for of in (True, False))
        decision = decide(rollout, Figures(reward=others), Figures(reward=mine), elapsed_s=0.0)
        if decision.action != "wait":
            return _end(decision.action, decision.reason)
    return "wait"


def _cluster(rewards: np.ndarray) -> SampleStatistics:
    if not rewards.size:
        return SampleStatistics()
    units, mean = len(rewards), float(rewards.mean())
    squares = float(((rewards - mean).sum(axis=1) ** 2).sum())
    return SampleStatistics(rewards.size, units, mean, spread(rewards.size, units, squares, float(rewards.size)))


def _end(action: str, reason: str) -> str:
    return "worse" if reason.startswith("it earns less") else action


def _power(ends: Sequence[Trial]) -> tuple[str, str, str]:
    decided = [each for each in ends if not each.decision.reason.startswith("the window has ended")]
    actions = [each.decision.action for each in decided]
    said = ", ".join(f"{100 * actions.count(each) / len(ends):.0f} % {each}" for each in sorted({*actions}))
    if not decided:
        return "none", "", ""
    mine = sorted(each.of_tried for each in decided)
    most = mine[int(0.9 * (len(mine) - 1))]
    return said, f"{statistics.median(mine):.0f} ({most})", f"{statistics.median(each.rewards for each in decided):.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
