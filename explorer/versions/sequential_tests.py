"""Tests that may be looked at after every reply: how often one looks does not make an error more probable.

Means: the score of a difference, as it runs on, is a Brownian motion B in time t, the information gathered. Robbins and
Siegmund (Boundary crossing probabilities for the Wiener process and sample sums, Annals of Mathematical Statistics 41,
1970) mix its drifts evenly over one side, and find for a > 0 that

    P(B(t) / sqrt(t) >= sqrt(a^2 + log(t / m)) for any t >= m)  <=  1 - F(a) + f(a) (a + f(a) / F(a)),

F and f being the normal distribution and its density. That it holds for means of anything with a variance that is
estimated, from `m` replies on, is shown by Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform central limit
theory and asymptotic confidence sequences, Annals of Statistics 52, 2024, arXiv 2103.06476).

Shares: the chances of what was seen, mixed evenly over all shares above the one allowed, as a multiple of its chance at
that one, is a martingale there; by Ville's inequality it ever reaches 1 / error with the probability `error` at most.
"""

import math
from functools import cache
from typing import NamedTuple

from tuneloop.shared.evaluation.samples import SampleStatistics, Share

#: A variance between fewer units is not known well enough.
LEAST_UNITS = 10

#: Fewer replies or requests than that say nothing of latency, length, failures and refusals.
LEAST_REPLIES = 20


class Contrast(NamedTuple):
    """How far the mean of one sample lies above another's: the difference in standard errors is tested with `bound`."""

    difference: float
    error: float
    bound: float

    @property
    def higher(self) -> bool:
        """Whether it is shown to be higher."""
        return self.difference > self.bound * self.error

    @property
    def lower(self) -> bool:
        """Whether it is shown to be lower."""
        return -self.difference > self.bound * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true difference lies, however often one looks, but for the error on either side."""
        return self.difference - self.bound * self.error, self.difference + self.bound * self.error


def contrast(one: SampleStatistics, other: SampleStatistics, *, least: int, error: float) -> Contrast | None:
    """How far `one` lies above `other`, with the probability `error` of a mistake on either side.

    None until both have `least` replies, and enough independent units.
    """
    if min(one.replies, other.replies) < least or min(one.units, other.units) < LEAST_UNITS:
        return None
    difference = one.mean - other.mean
    # The clock began at the latest when both had `least` replies; an earlier begin only widens the bound.
    elapsed = 2 * (one.replies / least) * (other.replies / (one.replies + other.replies))
    found = Contrast(difference, standard_error(one, other), math.sqrt(_level(error) ** 2 + math.log(elapsed)))
    return found if all(map(math.isfinite, found)) else None


def scale(sample: SampleStatistics, times: float) -> SampleStatistics:
    """The sample of values that are so many times as high."""
    return sample._replace(mean=times * sample.mean, variance=times**2 * sample.variance)


def largest_allowed(share: Share, margin: float, *, error: float) -> float:
    """The highest share that may be the true one, which is a limit to the other version's, too, and the margin."""
    from scipy import special  # takes a third of the time that the explorer's processes need for their imports

    found, of = share
    highest = float(special.betaincinv(found + 1, of - found, 1 - error)) if found < of else 1.0
    return min(1.0, highest + margin)


def exceeds(share: Share, limit: float, *, error: float) -> bool:
    """Whether the true share is shown to be above the limit."""
    from scipy import special

    found, of = share
    if of < LEAST_REPLIES or not 0 < limit < 1 or found <= limit * of:
        return False
    a, b = found + 1, of - found + 1
    mixed = special.betaln(a, b) + math.log(special.betaincc(a, b, limit)) - math.log1p(-limit)
    at_limit = found * math.log(limit) + (of - found) * math.log1p(-limit)
    return bool(mixed - at_limit >= -math.log(error))


def standard_error(one: SampleStatistics, other: SampleStatistics) -> float:
    """That of the difference: by the spread within each, or by that of all values taken as one, whichever is larger.

    The second is right where the two are the same, and says enough where few values happen to be all alike. Both need
    two units.
    """
    difference, total = one.mean - other.mean, one.units + other.units
    first, second = one.variance / one.replies, other.variance / other.replies
    within = first * one.units * (one.units - 1) + second * other.units * (other.units - 1)
    between = difference**2 * one.units * other.units / total
    together = (within + between) / (total - 1) * (1 / one.units + 1 / other.units)
    variance = first + second
    if variance > 0:
        # The degrees of freedom of the spread within both (Welch, Satterthwaite), and the variance with which a normal
        # score is as rare as Student's with so few of them.
        weight = first / variance
        freedom = 1 / (weight**2 / (one.units - 1) + (1 - weight) ** 2 / (other.units - 1))
        excess = difference**2 / variance / freedom
        variance *= excess / math.log1p(excess) if excess > 1e-9 else 1.0
    return math.sqrt(max(together, variance))


@cache
def _level(error: float) -> float:
    """The a of the inequality above, for the error on one side."""
    low, high = 0.0, 40.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        density = math.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
        below = math.erfc(-middle / math.sqrt(2)) / 2
        crossing = math.erfc(middle / math.sqrt(2)) / 2 + density * (middle + density / below)
        low, high = (middle, high) if crossing > error else (low, middle)
    return high
