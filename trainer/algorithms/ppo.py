"""PPO with a critic, on replies sampled and rewarded some versions ago.

    advantage  GAE over action tokens, then whitened; R = A + V_old before whitening    arXiv 1506.02438, eq. 16
               whitened, 0 if all replies of the batch have one reward
    actor      the clipped loss of terms.py                                              1707.06347, eq. 7
    critic     max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2                 1811.02553v3, section 4.1

The engine's log-probabilities are the "old" ones, since late feedback makes them the behaviour policy's;
`off_policy.proximal` can recompute them. Not implemented: the adaptive KL coefficient; early stopping on KL, since a
mini-batch is seen once by default; separate lambda for actor and critic.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    CallRewards,
    Loss,
    Prepared,
    Targets,
    Totals,
    gae,
    require,
    subtract_kl_penalty,
    token_mean,
    whiten,
)


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    advantages_BR, returns_BR = gae(
        subtract_kl_penalty(algorithm, targets, calls.paid_BR),
        require(targets.values_BR),
        targets.mask_BR,
        calls.ends_BR,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    advantages_BR = whiten(advantages_BR, targets.mask_BR)
    if algorithm.kl_in != "reward" and not (calls.rewards_C != calls.rewards_C[0]).any():
        # Only the critic's error is left; whitened to variance 1, the actor would follow it.
        advantages_BR = torch.zeros_like(advantages_BR)
    return replace(targets, advantages_BR=advantages_BR, returns_BR=returns_BR), baselines


def value_loss(values_BR: Tensor, old_BR: Tensor, returns_BR: Tensor, *, clip_range: float) -> tuple[Tensor, Tensor]:
    """The loss per token, and whether the clip to old ± clip_range applied."""
    near_BR = old_BR + (values_BR - old_BR).clamp(-clip_range, clip_range)
    free_BR = (values_BR - returns_BR).square()
    held_BR = (near_BR - returns_BR).square()
    return 0.5 * torch.maximum(free_BR, held_BR), held_BR > free_BR


def critic_loss(algorithm: AlgorithmSettings, targets: Targets, values_BR: Tensor, totals: Totals) -> Loss:
    """The critic's loss on a micro-batch, always a mean over tokens."""
    each_BR, clipped_BR = value_loss(
        values_BR, require(targets.values_BR), require(targets.returns_BR), clip_range=algorithm.value_clip_range
    )
    loss = token_mean(each_BR, targets.mask_BR, totals.tokens)
    clipped = token_mean(clipped_BR.float(), targets.mask_BR, totals.tokens)
    return Loss(loss, {"critic/vf_loss": loss.detach(), "critic/vf_clipfrac": clipped})
