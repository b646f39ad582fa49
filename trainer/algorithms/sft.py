"""Supervised fine-tuning: imitation of given answers.

    loss = -log policy(token), averaged as `loss_agg_mode` says     arXiv 2203.02155, section 3.5, without a formula

at temperature 1. trainer/batches/selection.py chooses what is imitated: edited answers, and replies that were rewarded
enough.
`raft` is the same loss on replies alone, of each group the best (RAFT, arXiv 2304.06767, algorithm 1).

Left out: weights by reward (a reply is imitated or it is not); a divergence from the base model; label smoothing; the
prompt's own tokens.
"""

from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Baselines, CallRewards, Loss, Targets, Totals, aggregate, token_mean


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """There is nothing to prepare."""
    return targets, baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    """The loss of a micro-batch."""
    loss = aggregate(algorithm, -logprobs_BR, targets.mask_BR, totals)
    metrics = {
        "actor/sft_loss": loss.detach(),
        "actor/entropy": token_mean(entropy_BR, targets.mask_BR, totals.tokens).detach(),
    }
    return Loss(loss, metrics)
