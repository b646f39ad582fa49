"""The feedback on a run."""

import random
from dataclasses import dataclass

from examples.tasks.dialogue import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rater:
    """Turns verdicts into rewards: unchanged, the opposite in the share `flip`, `offset` higher, or tossed."""

    low: float
    high: float
    flip: float = 0.0
    offset: float = 0.0
    coin: bool = False

    def reward(self, verdict: Verdict, chance: random.Random) -> float:
        """What the feedback says."""
        reward = verdict.reward
        if self.coin:
            reward = chance.choice((self.low, self.high))
        elif chance.random() < self.flip:
            reward = self.low + self.high - reward
        return reward + self.offset
