"""REINFORCE++: the batch is the baseline, without critic and group.

    return     G_t = sum over l >= t of gamma^(l - t) (reward paid at l - kl_coef * divergence at l)
    advantage  G whitened over all action tokens of the batch                            arXiv 2501.03262
    actor      the clipped loss of terms.py

The whitening is the paper's global advantage normalization. With `kl_in: reward` the divergence (k1 in the paper) is
part of the return, otherwise of the loss. The return covers action tokens and ends at each reward: per call, or by
`credit` per trajectory. Not implemented: the variant with a group baseline; clipping rewards (see `reward.clip`).
"""

from dataclasses import replace

import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    CallRewards,
    Prepared,
    Targets,
    gae,
    subtract_kl_penalty,
    whiten,
)


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    """With values of 0 and lambda 1, GAE is the return."""
    paid_BR = subtract_kl_penalty(algorithm, targets, calls.paid_BR)
    nothing_BR = torch.zeros_like(paid_BR)
    returns_BR, _ = gae(paid_BR, nothing_BR, targets.mask_BR, calls.ends_BR, gamma=algorithm.gamma, lam=1.0)
    return replace(targets, advantages_BR=whiten(returns_BR, targets.mask_BR), returns_BR=returns_BR), baselines
