"""Kahneman-Tversky optimisation: replies that were wanted or not, each by itself.

    r      = log(policy / base)(reply)                                               arXiv 2402.01306v1, eq. 7
    z      = max(0, mean of log(policy / base) over prompts with the next row's reply)
    loss   = 1 - sigmoid(beta (r - z))  of a reply with reward >= threshold          mean over replies
             1 - sigmoid(beta (z - r))  of any other

Log-probabilities are sums over the reply at temperature 1. z, an estimate of KL(policy || base), is a constant of the
step: it is taken once, at its start, over the whole batch. A batch of one reply has no other's, and z is 0.
A pair that is longer than the model takes is left out of it.

Left out: a new z for every mini-batch; how far a reward lies from the threshold; weights that balance the numbers of
wanted and unwanted replies.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    CallRewards,
    Loss,
    Targets,
    Totals,
    log_ratios,
    require,
    sequence_sums,
    token_mean,
)


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """1 for the desirable rows, -1 for the others; the divergence is never negative."""
    rewards_B = calls.rewards_C.new_zeros(len(targets.mask_BR)).index_copy(0, calls.rows_C, calls.rewards_C)
    signs_B = torch.where(rewards_B >= algorithm.kto.threshold, 1, -1)
    return replace(targets, signs_B=signs_B, divergence=require(targets.divergence).clamp(min=0)), baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    """The loss of a micro-batch."""
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
