"""What a version would have earned where another one answered, reckoned from replies that nothing is trained on. Pure.

The estimate is self-normalised importance sampling (Swaminathan and Joachims, The Self-Normalized Estimator for
Counterfactual Learning, NIPS 2015), each weight truncated at the square root of the number of replies (Ionides,
Truncated Importance Sampling, Journal of Computational and Graphical Statistics 17, 2008).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuneloop.shared.errors import NotEvaluated
from tuneloop.shared.evaluation.scores import Figure
from tuneloop.shared.experience import Float32s, Int32s

#: The estimates of the candidate and of the champion on the very same replies, and of how many rewards they are worth.
REPLAY, REPLAY_BEFORE, REPLAY_SIZE = "replay", "replay_champion", "replay_size"

#: Not a measure: which champion the candidate was compared with. Its figures of another one say nothing.
REPLAY_OF = "replay_of"

#: All of these are of one candidate beside its champion, so that those of two versions say nothing of each other.
OF_A_REPLAY = (REPLAY, REPLAY_BEFORE, REPLAY_SIZE, REPLAY_OF)

#: With an effective size below this, nothing is concluded: a mean of rewards of 0 and 1 is then uncertain by 0.05.
LEAST_SIZE = 100.0

_LONGEST_SLICE = 64

_Floats = npt.NDArray[np.float64]


class HeldOutReply(NamedTuple):
    """A rewarded reply that nothing is trained on; `logprobs` are those that it was sampled with."""

    id: int
    prompt_ids: Int32s
    completion_ids: Int32s
    logprobs: Float32s
    temperature: float
    reward: float
    task_id: str | None

    @property
    def tokens(self) -> int:
        """Of the prompt and the reply."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def slice(self) -> str:
        """What stands before the first `/` of its task; empty for none."""
        return (self.task_id or "").partition("/")[0][:_LONGEST_SLICE]


class Estimate(NamedTuple):
    """A version's mean reward with its rewards' deviation, and how many rewards of its own that is worth."""

    value: float
    deviation: float
    size: float


def estimate(rewards: Sequence[float], log_ratios: Sequence[float]) -> Estimate:
    """The mean reward of a version, by rewards of replies and log(its probability of the reply / that when sampled).

    The effective size is Kish's, (Σw)² / Σw², or Σw where that is less: weights have a mean of 1, so that a smaller sum
    shows a version that would hardly have said any of this.

    >>> estimate([1.0, 0.0], [0.0, 0.0])
    Estimate(value=0.5, deviation=0.5, size=2.0)
    """
    capped = np.minimum(np.asarray(log_ratios, dtype=np.float64), math.log(len(rewards)) / 2)
    if np.isnan(capped).any():
        raise NotEvaluated("a log-probability of a held-out reply is no number")
    # Relative to the largest, so that they are never all 0, however unlikely the replies.
    largest = max(float(capped.max()), -1e9)
    weights: _Floats = np.exp(capped - largest)
    total = float(weights.sum())
    if not total:
        return Estimate(float(np.mean(rewards)), float(np.std(rewards)), 0.0)
    value = float(weights @ np.asarray(rewards)) / total
    spread = float(weights @ (np.asarray(rewards) - value) ** 2) / total
    size = min(total**2 / float((weights**2).sum()), total * math.exp(largest))
    return Estimate(value, math.sqrt(spread), size)


def replayed(
    replies: Sequence[HeldOutReply], candidate: Sequence[float], champion: Sequence[float], *, of: int
) -> tuple[Figure, ...]:
    """The candidate's figures of a replay, beside version `of`: by the log-probability that each gives to each reply.

    Of all the replies, and of each slice that has enough of them.
    """
    slices: dict[str, list[int]] = defaultdict(list)
    for at, reply in enumerate(replies):
        slices[reply.slice].append(at)
    parts = {name: places for name, places in sorted(slices.items()) if name and len(places) >= LEAST_SIZE}
    if replies:
        parts = {"": list(range(len(replies)))} | parts
    figures = [Figure(REPLAY_OF, "", float(of), 0.0, max(1, len(replies)))]
    for name, places in parts.items():
        rewards = [replies[at].reward for at in places]
        sampled = [float(replies[at].logprobs.sum(dtype=np.float64)) for at in places]
        now, before = (
            estimate(rewards, [told[at] - then for at, then in zip(places, sampled, strict=True)])
            for told in (candidate, champion)
        )
        figures += [
            Figure(REPLAY, name, now.value, now.deviation, len(places)),
            Figure(REPLAY_BEFORE, name, before.value, before.deviation, len(places)),
            Figure(REPLAY_SIZE, name, min(now.size, before.size), 0.0, len(places)),
        ]
    return tuple(figures)


def is_beside(figures: Sequence[Figure], champion: int) -> bool:
    """Whether there is a replay among the figures, beside this champion."""
    return any(each.metric == REPLAY_OF and each.value == champion for each in figures)


class Pair(NamedTuple):
    """Of one slice: the estimates of both versions, how many rewards they are worth, and of how many replies."""

    slice: str
    candidate: float
    champion: float
    size: float
    replies: int

    @property
    def concludes(self) -> bool:
        """Whether that is enough to say anything."""
        return self.size >= LEAST_SIZE


def pairs(figures: Sequence[Figure]) -> Iterator[Pair]:
    """What the candidate's figures of a replay say, of all replies first."""
    known = {(each.metric, each.slice): each for each in figures}
    for (metric, part), now in sorted(known.items()):
        if metric == REPLAY:
            before, size = known[REPLAY_BEFORE, part], known[REPLAY_SIZE, part]
            yield Pair(part, now.value, before.value, size.value, now.samples)
