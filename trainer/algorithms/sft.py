"""Supervised fine-tuning: imitates given answers.

    loss = -log policy(token), averaged as `loss_agg_mode` says     arXiv 2203.02155, section 3.5, without a formula

At temperature 1. trainer/batches/selection.py selects the targets: corrections, and replies with enough reward. `raft`
is the same loss on the best reply of each group (RAFT, arXiv 2304.06767, algorithm 1). Not implemented: weights by
reward; a divergence from the base model; label smoothing; the prompt's tokens.
"""

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import (
    Baselines,
    CallRewards,
    Loss,
    Prepared,
    Targets,
    Totals,
    aggregate,
    token_mean,
)


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    return targets, baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    loss = aggregate(algorithm, -logprobs_BR, targets.mask_BR, totals)
    metrics = {
        "actor/sft_loss": loss.detach(),
        "actor/entropy": token_mean(entropy_BR, targets.mask_BR, totals.tokens).detach(),
    }
    return Loss(loss, metrics)
