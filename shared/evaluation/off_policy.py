"""The reward that a version would have earned on replies of another one, estimated from held-out replies. Pure.

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
REPLAY, REPLAY_CHAMPION, REPLAY_SIZE = "replay", "replay_champion", "replay_size"

#: Not a measure: which champion the candidate was compared with. Figures against another one are not comparable.
REPLAY_AGAINST = "replay_of"

#: All of these are of one candidate against its champion, so that those of two versions cannot be compared.
REPLAY_METRICS = (REPLAY, REPLAY_CHAMPION, REPLAY_SIZE, REPLAY_AGAINST)

#: With an effective size below this, nothing is concluded: a mean of rewards of 0 and 1 is then uncertain by 0.05.
MIN_EFFECTIVE_SIZE = 100.0

_LONGEST_SLICE = 64

_Floats = npt.NDArray[np.float64]


class HeldOutReply(NamedTuple):
    """A rewarded reply that is held out of training; `logprobs` are those that it was sampled with."""

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
        """The part of its task_id before the first `/`; empty for none."""
        return (self.task_id or "").partition("/")[0][:_LONGEST_SLICE]


class Estimate(NamedTuple):
    """A version's mean reward with its rewards' deviation, and how many rewards of its own that is worth."""

    value: float
    deviation: float
    size: float


def estimate(rewards: Sequence[float], log_ratios: Sequence[float]) -> Estimate:
    """The mean reward of a version, by rewards of replies and log(its probability of the reply / that when sampled).

    The effective size is Kish's, (Σw)² / Σw², or Σw where that is less: weights have a mean of 1, so that a smaller sum
    shows a version that would hardly have sampled any of these.

    >>> estimate([1.0, 0.0], [0.0, 0.0])
    Estimate(value=0.5, deviation=0.5, size=2.0)
    """
    capped = np.minimum(np.asarray(log_ratios, dtype=np.float64), math.log(len(rewards)) / 2)
    if np.isnan(capped).any():
        raise NotEvaluated("a log-probability of a held-out reply is not a number")
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


def replay_figures(
    replies: Sequence[HeldOutReply], candidate: Sequence[float], champion: Sequence[float], *, of: int
) -> tuple[Figure, ...]:
    """The candidate's figures of a replay against version `of`: by the log-probability that each gives to each reply.

    Of all the replies, and of each slice that has enough of them.
    """
    slices: dict[str, list[int]] = defaultdict(list)
    for at, reply in enumerate(replies):
        slices[reply.slice].append(at)
    parts = {name: members for name, members in sorted(slices.items()) if name and len(members) >= MIN_EFFECTIVE_SIZE}
    if replies:
        parts = {"": list(range(len(replies)))} | parts
    figures = [Figure(REPLAY_AGAINST, "", float(of), 0.0, max(1, len(replies)))]
    for name, members in parts.items():
        rewards = [replies[at].reward for at in members]
        sampled = [float(replies[at].logprobs.sum(dtype=np.float64)) for at in members]
        now, before = (
            estimate(
                rewards, [logprobs[at] - before_logprob for at, before_logprob in zip(members, sampled, strict=True)]
            )
            for logprobs in (candidate, champion)
        )
        figures += [
            Figure(REPLAY, name, now.value, now.deviation, len(members)),
            Figure(REPLAY_CHAMPION, name, before.value, before.deviation, len(members)),
            Figure(REPLAY_SIZE, name, min(now.size, before.size), 0.0, len(members)),
        ]
    return tuple(figures)


def is_replay_against(figures: Sequence[Figure], champion: int) -> bool:
    """Whether the figures hold a replay against this champion."""
    return any(each.metric == REPLAY_AGAINST and each.value == champion for each in figures)


class ReplayPair(NamedTuple):
    """Of one slice: the estimates of both versions, how many rewards they are worth, and of how many replies."""

    slice: str
    candidate: float
    champion: float
    size: float
    replies: int

    @property
    def concludes(self) -> bool:
        """Whether that is enough for a conclusion."""
        return self.size >= MIN_EFFECTIVE_SIZE


def replay_pairs(figures: Sequence[Figure]) -> Iterator[ReplayPair]:
    """The candidate's figures of a replay by slice, of all replies first."""
    by_metric = {(each.metric, each.slice): each for each in figures}
    for (metric, part), now in sorted(by_metric.items()):
        if metric == REPLAY:
            before, size = by_metric[REPLAY_CHAMPION, part], by_metric[REPLAY_SIZE, part]
            yield ReplayPair(part, now.value, before.value, size.value, now.samples)
