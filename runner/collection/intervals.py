"""Means, shares and differences with the intervals that hold them in 95 of 100 cases. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimated:
    """A figure of `count` units, and its interval; None where there are too few to tell."""

    value: float
    low: float | None
    high: float | None
    count: int

    @property
    def distinct(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def share_of(hits: int, count: int) -> Estimated | None:
    """A share, with Wilson's interval; None of nothing.

    >>> share_of(8, 10)
    Estimated(value=0.8, low=0.49016, high=0.94332, count=10)
    """
    if count == 0:
        return None
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return Estimated(share, round(max(0.0, centre - half), 5), round(min(1.0, centre + half), 5), count)


def mean_of(values: Sequence[float]) -> Estimated | None:
    """A mean, with Student's interval; None of nothing."""
    if not values:
        return None
    if len(values) < 2:
        return Estimated(values[0], None, None, 1)
    half = student_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimated(fmean(values), fmean(values) - half, fmean(values) + half, len(values))


def difference_of(a: Sequence[float], b: Sequence[float]) -> Estimated | None:
    """The mean of `b` less that of `a`, with Welch's interval; None if either is empty. `count` is the fewer."""
    if not a or not b:
        return None
    difference, count = fmean(b) - fmean(a), min(len(a), len(b))
    if count < 2:
        return Estimated(difference, None, None, count)
    first, second = variance(a) / len(a), variance(b) / len(b)
    if first + second == 0:
        return Estimated(difference, difference, difference, count)
    freedom = (first + second) ** 2 / (first**2 / (len(a) - 1) + second**2 / (len(b) - 1))
    half = student_quantile(freedom) * math.sqrt(first + second)
    return Estimated(difference, difference - half, difference + half, count)


def student_quantile(freedom: float) -> float:
    """Student's t that 2.5 % lie above, by bisection of its distribution.

    >>> round(student_quantile(10), 3), round(student_quantile(1000), 3)
    (2.228, 1.962)
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        # The probability beyond +-t is the regularised incomplete beta function at df / (df + t^2).
        beyond = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + middle * middle))
        low, high = (middle, high) if beyond > 1 - _LEVEL else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), by Lentz's continued fraction on the side on which it converges fast."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 300):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return front * fraction / a
