"""Distillation: become like a teacher.

    reverse_kl   policy gradient with the advantage of each token                        arXiv 2306.13649;
                 A = log teacher(token) - log policy(token), no gradient through it      thinkingmachines.ai/blog,
                 in the clipped loss of terms.py                                         On-Policy Distillation
    replies      -log policy(token) on the teacher's replies: sft.py                     1606.07947, section 3.2

In expectation, the update of `reverse_kl` lessens KL(policy || teacher) at each token of the model's own replies. The
policy is taken at the temperature that a reply was sampled at, the teacher at 1. An advantage beyond 20 nats is cut
there: a teacher that rules a token out says -inf.

Left out: rewards and whitening (the scale of A means something); the teacher's whole distribution,
which an endpoint does not return; the discounted sum of the advantages that follow.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import sft
from tuneloop.trainer.algorithms.terms import (
    MAX_LOG_RATIO,
    Baselines,
    CallRewards,
    Loss,
    Targets,
    Totals,
    require,
    surrogate,
    token_mean,
)


def prepare(
    algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines
) -> tuple[Targets, Baselines]:
    """Advantages depend on the policy of the moment: they are made in the loss."""
    return targets, baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    """The loss of a micro-batch."""
    if algorithm.distill.mode == "replies":
        return sft.actor_loss(algorithm, targets, logprobs_BR, entropy_BR, totals)
    apart_BR = require(targets.teacher_BR) - logprobs_BR.detach()
    advantages_BR = torch.where(targets.mask_BR, apart_BR, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss = surrogate(algorithm, replace(targets, advantages_BR=advantages_BR), logprobs_BR, entropy_BR, totals)
    distance = token_mean(-advantages_BR, targets.mask_BR, totals.tokens)
    return Loss(loss.value, {**loss.metrics, "actor/teacher_kl": distance})
