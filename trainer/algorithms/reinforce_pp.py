"""REINFORCE++: no critic and no group; the batch is what a token is compared with.

    return     G_t = sum over l >= t of gamma^(l - t) (reward paid at l - kl_coef * divergence at l)
    advantage  G whitened over all action tokens of the batch                            arXiv 2501.03262
    actor      the clipped loss of terms.py

The whitening is the paper's global advantage normalization. The divergence (the paper's is k1) counts in the return
with `kl_in: reward`, as in the paper; else in the loss. The return goes over action tokens only and ends where a reward
is paid: at the end of each call, or, by `credit`, of the trajectory.

Left out: the variant with a group's mean as baseline; clipping of rewards in here (`reward.clip` does it before).
"""

from dataclasses import replace

import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, Targets, gae, subtract_kl_penalty, whiten


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """Advantages and returns of a whole batch: with values of 0 and lambda 1, GAE is the return."""
    paid_BR = subtract_kl_penalty(algorithm, targets, calls.paid_BR)
    nothing_BR = torch.zeros_like(paid_BR)
    returns_BR, _ = gae(paid_BR, nothing_BR, targets.mask_BR, calls.ends_BR, gamma=algorithm.gamma, lam=1.0)
    advantages_BR = whiten(returns_BR, targets.mask_BR)
    return replace(targets, advantages_BR=advantages_BR, returns_BR=returns_BR), baselines
