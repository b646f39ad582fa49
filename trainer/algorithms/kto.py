"""Kahneman-Tversky optimisation: trains on single replies that were desirable or not.

    r      = log(policy / base)(reply)                                               arXiv 2402.01306v1, eq. 7
    z      = max(0, mean of log(policy / base) over prompts with the next row's reply)
    loss   = 1 - sigmoid(beta (r - z))  of a reply with reward >= threshold          mean over replies
             1 - sigmoid(beta (z - r))  of any other

Log-probabilities are sums over the reply at temperature 1. z estimates KL(policy || base) once, at the start of the
step, over the batch without pairs longer than the model's limit; it is 0 for a batch of one. Not implemented: z per
mini-batch; the distance of a reward from the threshold; weights that balance desirable and undesirable replies.
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
    log_ratios,
    require,
    sequence_sums,
    token_mean,
)


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    """Signs are 1 for desirable rows, otherwise -1; the divergence is at least 0."""
    rewards_B = calls.rewards_C.new_zeros(len(targets.mask_BR)).index_copy(0, calls.rows_C, calls.rewards_C)
    signs_B = torch.where(rewards_B >= algorithm.kto.threshold, 1, -1)
    return replace(targets, signs_B=signs_B, divergence=require(targets.divergence).clamp(min=0)), baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    options, divergence = algorithm.kto, require(targets.divergence)
    ratios_B, signs_B = log_ratios(targets, logprobs_BR), require(targets.signs_B)
    desirable_B = signs_B > 0
    loss = (1 - torch.sigmoid(options.beta * signs_B * (ratios_B - divergence))).sum() / totals.sequences
    metrics = {
        "actor/kto_loss": loss,
        "actor/entropy": token_mean(entropy_BR, targets.mask_BR, totals.tokens),
        "kl": divergence * len(signs_B) / totals.sequences,
    }
    policy_B = sequence_sums(logprobs_BR, targets.mask_BR)
    counts = {"chosen": totals.desirable, "rejected": totals.sequences - totals.desirable}
    for name, which_B in (("chosen", desirable_B), ("rejected", ~desirable_B)):
        metrics[f"rewards/{name}"] = options.beta * ratios_B[which_B].sum() / max(1, counts[name])
        metrics[f"logps/{name}"] = policy_B[which_B].sum() / max(1, counts[name])
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return Loss(loss, {name: value.detach() for name, value in metrics.items()})
