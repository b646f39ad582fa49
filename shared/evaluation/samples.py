"""What two versions are compared by: means with their spread, and shares.

Many replies may carry little more information than one: those to one user resemble each other. So statistics count the
independent units that replies come from, and its variance is that of a mean over such units.
"""

from typing import NamedTuple


class SampleStatistics(NamedTuple):
    """A mean of `replies` from `units` independent sources; `variance / replies` is the variance of the mean."""

    replies: int = 0
    units: int = 0
    mean: float = 0.0
    variance: float = 0.0


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
