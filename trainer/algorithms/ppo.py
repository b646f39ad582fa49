"""PPO with a critic, on replies that were sampled and rewarded some time ago.

    ratio      r = exp(logprob - logprob as sampled)                            arXiv 1707.06347, eq. 6
    policy     max(-A r, -A clip(r, 1 - low, 1 + high))                         eq. 7; low and high apart: 2503.14476
               and for A < 0 at most -A c                                       dual clip, 1912.09729, eq. 5
    value      max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2
    advantage  GAE over action tokens, then whitened; R = A + V_old before whitening

    actor loss = mean policy + kl_coef * mean KL(policy, base model) - entropy_coef * mean entropy

Every mean is over all action tokens of the mini-batch, however it is cut into micro-batches.

Left out: a second pass for "old" log-probabilities, because those the engine sampled with are the true behaviour
policy, and with late feedback they are what makes the ratio right; importance weights beside the ratio, which would
count the same correction twice; KL inside the reward and its adaptive coefficient, which make the critic learn a moving
target; early stopping on KL, because a mini-batch is seen once by default.
"""

import torch
from torch import Tensor

from shared.config import Algorithm
from trainer.algorithms.estimators import MAX_LOG_RATIO, gae, kl, token_mean, whiten
from trainer.algorithms.targets import Loss, Targets


def advantages(algorithm: Algorithm, rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a whole batch."""
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, gamma=algorithm.gamma, lam=algorithm.lam)
    if algorithm.whiten_advantages:
        advantages_BR = whiten(advantages_BR, mask_BR)
    return advantages_BR, returns_BR


def policy_loss(
    log_ratio_BR: Tensor, advantages_BR: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Per token: the loss, and whether the clip to [1 - low, 1 + high] decided it."""
    ratio_BR = log_ratio_BR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_BR = -advantages_BR * ratio_BR
    held_BR = -advantages_BR * ratio_BR.clamp(1 - low, 1 + high)
    loss_BR = torch.maximum(free_BR, held_BR)
    if dual is not None:
        loss_BR = torch.where(advantages_BR < 0, torch.minimum(loss_BR, -advantages_BR * dual), loss_BR)
    return loss_BR, held_BR > free_BR


def value_loss(values_BR: Tensor, old_BR: Tensor, returns_BR: Tensor, *, clip_range: float) -> tuple[Tensor, Tensor]:
    """Per token: the loss, and whether the clip to old ± clip_range decided it."""
    near_BR = old_BR + (values_BR - old_BR).clamp(-clip_range, clip_range)
    free_BR = (values_BR - returns_BR).square()
    held_BR = (near_BR - returns_BR).square()
    return 0.5 * torch.maximum(free_BR, held_BR), held_BR > free_BR


def actor_loss(algorithm: Algorithm, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, *, tokens: int) -> Loss:
    """The actor's loss on a micro-batch of a mini-batch of `tokens` action tokens."""

    def mean(each_BR: Tensor) -> Tensor:
        return token_mean(each_BR, targets.mask_BR, tokens)

    log_ratio_BR = logprobs_BR - targets.sampled_BR
    high = algorithm.clip_range if algorithm.clip_range_high is None else algorithm.clip_range_high
    policy_BR, clipped_BR = policy_loss(
        log_ratio_BR, targets.advantages_BR, low=algorithm.clip_range, high=high, dual=algorithm.dual_clip
    )
    policy, entropy = mean(policy_BR), mean(entropy_BR)
    loss = policy - algorithm.entropy_coef * entropy
    metrics = {
        "actor/pg_loss": policy,
        "actor/ppo_kl": mean(-log_ratio_BR),
        "actor/pg_clipfrac": mean(clipped_BR.float()),
        "actor/entropy": entropy,
        "mismatch_kl/mean": mean(kl(targets.sampled_BR, logprobs_BR, "k3")),
    }
    if targets.reference_BR is not None:
        divergence = mean(kl(logprobs_BR, targets.reference_BR, algorithm.kl_estimator))
        loss = loss + algorithm.kl_coef * divergence
        metrics["actor/kl_loss"] = divergence
    return Loss(loss, {name: value.detach() for name, value in metrics.items()})


def critic_loss(algorithm: Algorithm, targets: Targets, values_BR: Tensor, *, tokens: int) -> Loss:
    """The critic's loss on a micro-batch of a mini-batch of `tokens` action tokens."""
    each_BR, clipped_BR = value_loss(
        values_BR, targets.values_BR, targets.returns_BR, clip_range=algorithm.value_clip_range
    )
    loss = token_mean(each_BR, targets.mask_BR, tokens)
    clipped = token_mean(clipped_BR.float(), targets.mask_BR, tokens)
    return Loss(loss, {"critic/vf_loss": loss.detach(), "critic/vf_clipfrac": clipped})
