"""Advantages, whitening and divergences against their definitions."""

import pytest
import torch

from tuneloop.trainer.algorithms.terms import explained_variance, gae, kl, whiten


def _textbook(rewards, values, mask, *, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_(t+l), over the action tokens alone, written as the double sum."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        steps = [t for t in range(values.shape[1]) if mask[row, t]]
        v = [*values[row, steps].tolist(), 0.0]
        r = rewards[row, steps].tolist()
        for i, t in enumerate(steps):
            advantages[row, t] = sum(
                (gamma * lam) ** (k - i) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(i, len(steps))
            )
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.9, 1.0)])
def test_gae_is_the_textbook_sum_also_with_masked_tokens_in_the_middle(gamma, lam):
    random = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(16, 12, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(16, 12, generator=random) < 0.6
    mask[:, 5] = True
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = _textbook(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=0, atol=1e-12)


def test_whitening_leaves_a_single_token_as_it_is():
    mask = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[0.7, 5.0]]), mask).tolist() == [[pytest.approx(0.7), 0.0]]


def test_whitening_of_equal_tokens_is_zero_not_nan():
    assert whiten(torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool)).abs().max() == 0


def test_a_divergence_stays_finite_however_far_apart_the_models_are():
    for estimator in ("k1", "k2", "k3"):
        assert kl(torch.tensor([-500.0]), torch.tensor([0.0]), estimator).isfinite().all()


def test_a_critic_that_knows_the_returns_explains_them():
    returns, mask = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    assert explained_variance(returns, returns, mask).item() == 1
    assert explained_variance(torch.zeros(1, 3), returns, mask).item() == 0
    assert explained_variance(returns, torch.ones(1, 3), mask).item() == 0
