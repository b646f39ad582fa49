"""Simulated rollouts: rewards drawn for two versions, and the decision computed after each."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tuneloop.explorer.versions.trial import RolloutDecision, decide
from tuneloop.shared.evaluation.samples import Figures, SampleStatistics
from tuneloop.shared.settings.versions import RolloutSettings

Draw = Callable[[np.random.Generator, int], np.ndarray]


class Traffic(NamedTuple):
    """What both versions earn."""

    champion: Draw
    tried: Draw


class Trial(NamedTuple):
    """How a rollout ended: what was decided, and after how many rewarded replies, of the tried version and in all."""

    decision: RolloutDecision
    of_tried: int
    rewards: int


def bernoulli(share: float) -> Draw:
    """Rewards of 1 with that probability, else 0."""
    return lambda rng, count: (rng.random(count) < share).astype(float)


def normal(mean: float, deviation: float = 1.0) -> Draw:
    """Rewards of any size."""
    return lambda rng, count: rng.normal(mean, deviation, count)


def trial(seed: int, rollout: RolloutSettings, traffic: Traffic, *, rewards: int, every: int = 10) -> Trial:
    """One rollout, looked at after `every` rewarded replies until it is decided, or until its window ends after all."""
    rng = np.random.default_rng([seed, rewards])
    is_tried = rng.random(rewards) < rollout.tried_share
    values = np.where(is_tried, traffic.tried(rng, rewards), traffic.champion(rng, rewards))
    seen = {of: _sums(values, is_tried == of) for of in (True, False)}
    for looked in range(every, rewards + 1, every):
        elapsed_s = rollout.window if looked + every > rewards else 0.0
        decision = decide(rollout, *(_figures(seen[of], looked) for of in (False, True)), elapsed_s=elapsed_s)
        if decision.action != "wait":
            break
    return Trial(decision, _figures(seen[True], looked).reward.replies, looked)


def trials(count: int, rollout: RolloutSettings, traffic: Traffic, *, rewards: int) -> Iterator[Trial]:
    """Many of them, the same ones every time."""
    for seed in range(count):
        yield trial(seed, rollout, traffic, rewards=rewards)


def _figures(sums: np.ndarray, seen: int) -> Figures:
    """The figures of one version after so many rewards."""
    return Figures(reward=_sample(sums[seen - 1]))


def _sums(values: np.ndarray, mine: np.ndarray) -> np.ndarray:
    return np.cumsum(np.stack([mine, values * mine, values**2 * mine]), axis=1).T


def _sample(sums: np.ndarray) -> SampleStatistics:
    count, total, squares = int(sums[0]), float(sums[1]), float(sums[2])
    if count == 0:
        return SampleStatistics()
    variance = max(0.0, squares - total**2 / count) / (count - 1) if count > 1 else 0.0
    return SampleStatistics(count, count, total / count, variance)
