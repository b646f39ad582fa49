"""Distillation: trains the policy to match a teacher.

    reverse_kl   policy gradient with the advantage of each token                        arXiv 2306.13649;
                 A = log teacher(token) - log policy(token), no gradient through it      thinkingmachines.ai/blog,
                 in the clipped loss of terms.py                                         On-Policy Distillation
    replies      -log policy(token) on the teacher's replies: sft.py                     1606.07947, section 3.2

In expectation, `reverse_kl` reduces KL(policy || teacher) at each token of the model's own replies. The policy has the
temperature of the sampling, the teacher 1. Advantages are clamped to 20 nats: a teacher may return -inf. Not
implemented: rewards and whitening (the scale of A has a meaning); the teacher's full distribution, which endpoints do
not return; a discounted sum of later advantages.
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
    Prepared,
    Targets,
    Totals,
    require,
    surrogate,
    token_mean,
)


def prepare(algorithm: AlgorithmSettings, targets: Targets, calls: CallRewards, baselines: Baselines) -> Prepared:
    """The loss makes the advantages: they depend on the current policy."""
    return targets, baselines


def actor_loss(
    algorithm: AlgorithmSettings, targets: Targets, logprobs_BR: Tensor, entropy_BR: Tensor, totals: Totals
) -> Loss:
    if algorithm.distill.mode == "replies":
        return sft.actor_loss(algorithm, targets, logprobs_BR, entropy_BR, totals)
    apart_BR = require(targets.teacher_BR) - logprobs_BR.detach()
    advantages_BR = torch.where(targets.mask_BR, apart_BR, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss = surrogate(algorithm, replace(targets, advantages_BR=advantages_BR), logprobs_BR, entropy_BR, totals)
    distance = token_mean(-advantages_BR, targets.mask_BR, totals.tokens)
    return Loss(loss.value, {**loss.metrics, "actor/teacher_kl": distance})
