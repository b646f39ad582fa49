"""Computes the statistics that versions are compared by: means with their variance, and shares.

Replies to one user correlate, so the sample size counts independent units, and the variance is that of a mean over
units.
"""

from typing import NamedTuple

#: Half of a 95 % interval, in standard errors.
_Z = 1.96


class SampleStatistics(NamedTuple):
    """A mean of `replies` from independent `units`; `variance / replies` is the mean's; `binary`: of 0 and 1."""

    replies: int = 0
    units: int = 0
    mean: float = 0.0
    variance: float = 0.0
    binary: bool = False

    @property
    def interval(self) -> tuple[float, float] | None:
        """What holds the true mean in 95 of 100 cases, Wilson's of binary values; None from one source."""
        if self.units < 2:
            return None
        error, squared = self.variance / self.replies, _Z * _Z
        if not self.binary:
            return self.mean - _Z * error**0.5, self.mean + _Z * error**0.5
        # As many independent values have the same error.
        count = self.mean * (1 - self.mean) / error * self.units / (self.units - 1) if error else self.units
        centre = (self.mean + squared / (2 * count)) / (1 + squared / count)
        half = _Z * (self.mean * (1 - self.mean) / count + squared / (4 * count**2)) ** 0.5 / (1 + squared / count)
        return max(0.0, centre - half), min(1.0, centre + half)


class Share(NamedTuple):
    """`found` of `of`: failed requests of all requests, say."""

    found: int = 0
    of: int = 0


class Figures(NamedTuple):
    """A version's figures since its rollout began: seconds per token, tokens, failures of its own engine."""

    reward: SampleStatistics = SampleStatistics()
    failures: Share = Share()
    refusals: Share = Share()
    latency: SampleStatistics = SampleStatistics()
    length: SampleStatistics = SampleStatistics()


def spread(replies: int, units: int, squares: float, under: float) -> float:
    """The linearised variance of a ratio of totals, clustered by units, from squares off the mean."""
    if units < 2 or under <= 0:
        return 0.0
    return replies * units / (units - 1) * max(squares, 0.0) / under**2


def ratio_of_sums(
    replies: float, units: float, over: float, under: float, squared: float, mixed: float, under_squared: float
) -> SampleStatistics:
    """The ratio of two totals, `over` and `under`, from their sums and those of their squares and products by unit."""
    if not under:
        return SampleStatistics()
    mean = over / under
    squares = squared - 2 * mean * mixed + mean**2 * under_squared
    count, sources = int(replies), int(units)
    return SampleStatistics(count, sources, mean, spread(count, sources, squares, under))
