"""The actor's loss of all policy-gradient methods: they differ in their advantages only.

    ratio      r = exp(logprob - logprob as sampled, or at the start of the step)     arXiv 1707.06347, eq. 6
    policy     max(-A r, -A clip(r, 1 - low, 1 + high))                   eq. 7; low and high apart: 2503.14476, eq. 8
               and for A < 0 at most -A c                                 dual clip, 1912.09729, eq. 5
    loss       policy x importance weight + kl_coef * KL(policy, base model)
               - entropy_coef * entropy                                   1707.06347, eq. 9

each averaged as `loss_agg_mode` says, over the whole mini-batch, however it is cut into micro-batches.
"""

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms.estimators import MAX_LOG_RATIO, aggregate, kl, token_mean
from tuneloop.trainer.algorithms.terms.targets import Loss, Targets, Totals, require


def clipped_policy_loss(
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


def surrogate(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    """The actor's loss on a micro-batch, from `targets.advantages_BR`."""

    def mean(each_BR: Tensor) -> Tensor:
        return token_mean(each_BR, targets.mask_BR, totals.tokens)

    def average(each_BR: Tensor) -> Tensor:
        return aggregate(algorithm, each_BR, targets.mask_BR, totals)

    recomputed = algorithm.off_policy.proximal == "recomputed"
    log_ratio_BR = logprobs_BR - (require(targets.start_BR) if recomputed else targets.sampled_BR)
    high = algorithm.clip_range if algorithm.clip_range_high is None else algorithm.clip_range_high
    policy_BR, clipped_BR = clipped_policy_loss(
        log_ratio_BR, require(targets.advantages_BR), low=algorithm.clip_range, high=high, dual=algorithm.dual_clip
    )
    if targets.weights_BR is not None:
        policy_BR = policy_BR * targets.weights_BR
    loss = average(policy_BR)
    if algorithm.entropy_coef:  # Times 0 it would have a gradient, of nothing, that costs as much as any.
        loss = loss - algorithm.entropy_coef * average(entropy_BR)
    mismatch_BR = kl(targets.sampled_BR, logprobs_BR, "k3")
    metrics = {
        "actor/pg_loss": average(policy_BR),
        "actor/ppo_kl": mean(-log_ratio_BR),
        "actor/pg_clipfrac": mean(clipped_BR.float()),
        "actor/entropy": mean(entropy_BR),
        "mismatch_kl/mean": mean(mismatch_BR),
    }
    if targets.fresh_BR is not None and totals.fresh:
        metrics["mismatch_kl/fresh"] = token_mean(mismatch_BR, targets.fresh_BR, totals.fresh)
    if targets.reference_BR is not None:
        divergence_BR = kl(logprobs_BR, targets.reference_BR, algorithm.kl_estimator)
        metrics["actor/kl_loss"] = mean(divergence_BR)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * average(divergence_BR)
    return Loss(loss, {name: value.detach() for name, value in metrics.items()})


def subtract_kl_penalty(algorithm: AlgorithmSettings, targets: Targets, paid_BR: Tensor) -> Tensor:
    """The rewards, less `kl_coef` times each token's divergence from the base model if that counts in the reward."""
    if algorithm.kl_in != "reward" or targets.reference_BR is None:
        return paid_BR
    policy_BR = targets.sampled_BR if targets.start_BR is None else targets.start_BR
    divergence_BR = kl(policy_BR, targets.reference_BR, algorithm.kl_estimator)
    return torch.where(targets.mask_BR, paid_BR - algorithm.kl_coef * divergence_BR, 0.0)
