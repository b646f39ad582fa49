"""What two versions are compared by: means with their spread, and shares.

Many replies may carry little more information than one: those to one user resemble each other. So statistics count the
independent units that replies come from, and its variance is that of a mean over such units.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self


class SampleStatistics(NamedTuple):
    """A mean of `replies` from `units` independent sources; `variance / replies` is the variance of the mean."""

    replies: int = 0
    units: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The statistics of values that are independent of each other."""
        count = len(values)
        if not count:
            return cls()
        mean = sum(values) / count
        variance = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
        return cls(count, count, mean, variance)

    @classmethod
    def ratio(cls, pairs: Sequence[tuple[float, float]]) -> Self:
        """All first values of independent pairs together, for one of all second values: seconds per token, say."""
        count, under = len(pairs), sum(second for _, second in pairs)
        if not under:
            return cls()
        mean = sum(first for first, _ in pairs) / under
        squares = sum((first - mean * second) ** 2 for first, second in pairs)
        return cls(count, count, mean, spread(count, count, squares, under))


class Share(NamedTuple):
    """`found` of `of`: failed requests of all requests, say."""

    found: int = 0
    of: int = 0


class Figures(NamedTuple):
    """The figures of one version since its rollout began.

    `failures` counts requests that failed by its own engine's fault, of all requests. `latency` is in seconds per token
    of a reply, `length` in tokens.
    """

    reward: SampleStatistics = SampleStatistics()
    failures: Share = Share()
    refusals: Share = Share()
    latency: SampleStatistics = SampleStatistics()
    length: SampleStatistics = SampleStatistics()


def spread(replies: int, units: int, squares: float, under: float) -> float:
    """The variance of a sample, from the squares of what each unit's total lies off the mean, over `under` in all.

    This is the linearised variance of a ratio of totals, clustered by units.
    """
    if units < 2 or under <= 0:
        return 0.0
    return replies * units / (units - 1) * max(squares, 0.0) / under**2
