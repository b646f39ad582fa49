"""Estimators that the algorithms share: advantages, whitening, divergences, and the means over tokens and sequences.

Dimension suffixes are explained in trainer/batches/batch.py.
"""

from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms.targets import Totals

#: A log-ratio beyond this is cut, so that its exponential stays finite in float32.
MAX_LOG_RATIO = 20.0


def token_mean(each_BR: Tensor, mask_BR: Tensor, tokens: int) -> Tensor:
    """The sum over the mask, divided by `tokens`: action tokens of the whole mini-batch, not this micro-batch."""
    return torch.where(mask_BR, each_BR, 0.0).sum() / tokens


def aggregate(algorithm: AlgorithmSettings, each_BR: Tensor, mask_BR: Tensor, totals: Totals) -> Tensor:
    """A micro-batch's share in the mean of a mini-batch, by `loss_agg_mode` (the names are verl's).

        token-mean                 sum / tokens                               DAPO, arXiv 2503.14476, eq. 8
        seq-mean-token-sum         sum / sequences
        seq-mean-token-mean        mean of each sequence, their mean          GRPO, 2402.03300, eq. 3
        seq-mean-token-sum-norm    sum / (sequences x loss_horizon)           Dr. GRPO, 2503.20783, section 3.2

    verl's own last mode divides by the width of the padding where no horizon is given.
    """
    if algorithm.loss_agg_mode == "token-mean":
        return token_mean(each_BR, mask_BR, totals.tokens)
    sums_B = torch.where(mask_BR, each_BR, 0.0).sum(1)
    match algorithm.loss_agg_mode:
        case "seq-mean-token-sum":
            pass
        case "seq-mean-token-mean":
            sums_B = sums_B / mask_BR.sum(1).clamp(min=1)
        case "seq-mean-token-sum-norm":
            sums_B = sums_B / algorithm.loss_horizon
        case _:
            assert_never(algorithm.loss_agg_mode)
    return sums_B.sum() / totals.sequences


def gae(
    rewards_BR: Tensor,
    values_BR: Tensor,
    mask_BR: Tensor,
    ends_BR: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over the action tokens only: (advantages, returns).

    A token outside the mask is no time step: value and advantage are carried past it. What comes after one of
    `ends_BR` belongs to another episode; None: a sequence is one. Both results are 0 outside the mask.
    """
    # Token by token there is little to do, and numpy begins sooner than torch.
    rewards_RB, values_RB, mask_RB = (np.ascontiguousarray(each.numpy().T) for each in (rewards_BR, values_BR, mask_BR))
    ends_RB = None if ends_BR is None else ends_BR.numpy().T
    advantages_RB = np.zeros_like(values_RB)
    next_value_B, advantage_B = advantages_RB[0].copy(), advantages_RB[0].copy()
    for t in reversed(range(len(values_RB))):
        if ends_RB is not None:
            next_value_B, advantage_B = next_value_B * ~ends_RB[t], advantage_B * ~ends_RB[t]
        delta_B = rewards_RB[t] + gamma * next_value_B - values_RB[t]
        advantage_B = np.where(mask_RB[t], delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = np.where(mask_RB[t], values_RB[t], next_value_B)
        advantages_RB[t] = advantage_B
    advantages_BR = torch.from_numpy(np.ascontiguousarray(advantages_RB.T))
    returns_BR = advantages_BR + values_BR
    return torch.where(mask_BR, advantages_BR, 0.0), torch.where(mask_BR, returns_BR, 0.0)


def whiten(each_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Shifted to mean 0 and scaled to variance 1 over the mask, 0 outside; fewer than two tokens stay as they are."""
    inside_N = each_BR[mask_BR]
    if len(inside_N) < 2:
        return torch.where(mask_BR, each_BR, 0.0)
    variance, mean = torch.var_mean(inside_N)
    return torch.where(mask_BR, (each_BR - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def kl(logprobs_BR: Tensor, reference_BR: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per token, an estimate of KL(policy || reference) from tokens of the policy (joschu.net/blog/kl-approx.html).

    As a loss, k2 has the gradient of the true divergence; k1's has mean 0, k3's is that of the forward divergence.
    """
    difference_BR = (logprobs_BR - reference_BR).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference_BR
        case "k2":
            return difference_BR.square() / 2
        case "k3":
            return torch.expm1(-difference_BR) + difference_BR
        case _:
            assert_never(estimator)


def explained_variance(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """1 for a critic that knows the returns, 0 for one that knows their mean, and 0 where returns do not vary."""
    returns_N = returns_BR[mask_BR]
    if len(returns_N) < 2:
        return returns_BR.new_zeros(())
    spread = returns_N.var()
    return torch.where(spread > 0, 1 - (returns_N - values_BR[mask_BR]).var() / spread.clamp(min=1e-12), 0.0)
