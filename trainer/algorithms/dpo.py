"""Direct preference optimisation: raises the preferred of two replies to one prompt over the rejected one.

    h      = beta * (log(policy / base)(chosen) - log(policy / base)(rejected))      arXiv 2305.18290, eq. 7
    loss   = -log sigmoid(h)                                                          mean over pairs

Log-probabilities are sums over the reply at temperature 1. Not implemented: label smoothing; margins; normalisation by
length; other losses (IPO, hinge, SimPO); a likelihood term on the chosen reply; pairs of a correction and its original.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
    """Signs and units of rows ordered as chosen, rejected, chosen, rejected, …"""
    rows = torch.arange(len(targets.mask_BR))
    if len(rows) % 2:
        raise ValueError(f"{len(rows)} replies do not form pairs")
    return replace(targets, signs_B=1 - 2 * (rows % 2), units_B=rows // 2), baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    """The loss of a micro-batch of whole pairs."""
    policy_B = sequence_sums(logprobs_BR, targets.mask_BR)
    rewards_B = algorithm.dpo.beta * log_ratios(targets, logprobs_BR)
    signs_B = require(targets.signs_B)
    # The pair of each row, from 0. Untyped in torch 2.13.
    units, pairs_B, rows_U = cast(
        tuple[Tensor, Tensor, Tensor], torch.unique(require(targets.units_B), return_inverse=True, return_counts=True)
    )
    balance_U = torch.zeros_like(units).index_add(0, pairs_B, signs_B.to(units.dtype))
    if bool((rows_U != 2).any()) or bool(balance_U.any()):
        raise ValueError("a pair was cut in two")
    margins_U = rewards_B.new_zeros(len(rewards_B) // 2).index_add(0, pairs_B, signs_B * rewards_B)
    loss = softplus(-margins_U).sum() / totals.units
    chosen_B, rejected_B = signs_B > 0, signs_B < 0
    metrics = {
        "actor/dpo_loss": loss,
        "actor/entropy": token_mean(entropy_BR, targets.mask_BR, totals.tokens),
        "rewards/chosen": rewards_B[chosen_B].sum() / totals.units,
        "rewards/rejected": rewards_B[rejected_B].sum() / totals.units,
        "rewards/margins": margins_U.sum() / totals.units,
        "rewards/accuracies": (margins_U > 0).double().sum() / totals.units,
        "logps/chosen": policy_B[chosen_B].sum() / totals.units,
        "logps/rejected": policy_B[rejected_B].sum() / totals.units,
    }
    return Loss(loss, {name: value.detach() for name, value in metrics.items()})
