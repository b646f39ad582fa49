"""The tests that may be looked at again and again, against what is known of them."""

import math

import numpy as np
import pytest
from scipy import stats

from tuneloop.explorer.versions.trial import contrast, exceeds
from tuneloop.shared.evaluation.samples import SampleStatistics, Share, spread


def sample(mean: float, replies: int = 100, *, variance: float = 1.0) -> SampleStatistics:
    return SampleStatistics(replies, replies, mean, variance)


def test_the_bound_is_that_of_robbins_and_siegmund():
    """At the begin of the clock it is the a with 1 - F(a) + f(a) (a + f(a) / F(a)) = error."""
    found = contrast(sample(0.0, 50), sample(0.0, 50), least=50, error=0.025)
    assert found is not None
    a, normal = found.bound, stats.norm()
    assert normal.sf(a) + normal.pdf(a) * (a + normal.pdf(a) / normal.cdf(a)) == pytest.approx(0.025, abs=1e-8)
    later = contrast(sample(0.0, 500), sample(0.0, 500), least=50, error=0.025)
    assert later is not None
    assert later.bound == pytest.approx(math.sqrt(a**2 + math.log(10)))


@pytest.mark.parametrize("error", [0.0006, 0.025, 0.1])
def test_a_brownian_motion_crosses_the_bound_as_rarely_as_said(error):
    """Over 2000 paths with looks so far apart that fewer crossings are seen than there are."""
    rng = np.random.default_rng(1)
    sizes = np.unique(np.geomspace(50, 50_000, 200).astype(int))
    steps = rng.normal(size=(2000, len(sizes))) * np.sqrt(np.diff(sizes, prepend=0))
    scores = np.cumsum(steps, axis=1) / np.sqrt(sizes)
    found = [contrast(sample(0.0, size), sample(0.0, size), least=50, error=error) for size in sizes]
    bounds = np.array([each.bound for each in found if each is not None])
    crossed = int((scores > bounds).any(axis=1).sum())
    assert stats.binomtest(crossed, 2000, error, alternative="greater").pvalue > 0.01


def test_large_samples_are_compared_by_welch_s_error():
    one, other = sample(1.0, 4000, variance=4.0), sample(1.05, 40_000, variance=1.0)
    found = contrast(one, other, least=50, error=0.025)
    assert found is not None
    assert found.error == pytest.approx(math.sqrt(4 / 4000 + 1 / 40_000), rel=0.01)
    assert found.interval == pytest.approx((-0.05 - found.bound * found.error, -0.05 + found.bound * found.error))
    assert (found.higher, found.lower) == (False, False)


def test_the_error_is_wider_where_few_values_happen_to_be_alike():
    """None of 50 against 2 of 100 is nothing: by the spread within each it would be 1.4 standard errors, it is 1."""
    found = contrast(sample(0.0, 50, variance=0.0), sample(0.02, variance=0.0196 * 100 / 99), least=50, error=0.025)
    assert found is not None
    assert -found.difference / found.error == pytest.approx(1.0, abs=0.01)


def test_units_count_not_replies():
    many = SampleStatistics(1000, 20, 1.0, 50.0)
    few = SampleStatistics(20, 20, 1.0, 1.0)
    other = SampleStatistics(1000, 20, 0.0, 50.0)
    errors = [contrast(one, other, least=20, error=0.025) for one in (many, few)]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0].error == pytest.approx(errors[1].error)


def test_a_share_at_the_limit_is_wrongly_said_to_exceed_it_no_more_often_than_the_error():
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(300):
        found = np.cumsum(rng.random(1000) < 0.1)
        wrong += any(exceeds(Share(int(found[of - 1]), of), 0.1, error=0.05) for of in range(20, 1001, 10))
    assert wrong <= 300 * 0.05


def test_the_ratio_of_totals_has_the_spread_of_its_linear_approximation():
    rng = np.random.default_rng(3)
    tokens = rng.integers(10, 100, size=(400, 200)).astype(float)
    seconds = 0.02 * tokens + rng.normal(0, 0.2, size=tokens.shape)
    means = seconds.sum(1) / tokens.sum(1)
    squares = ((seconds - means[:, None] * tokens) ** 2).sum(1)
    count = tokens.shape[1]
    found = [spread(count, count, *pair) / count for pair in zip(squares, tokens.sum(1), strict=True)]
    assert np.mean(found) == pytest.approx(np.var(means), rel=0.2)
    assert spread(1, 1, 0.0, 2.0) == spread(0, 0, 0.0, 0.0) == 0.0
