"""Distillation against others: verl's policy gradient of k1, and the gradient of TRL's KL(student || teacher)."""

from dataclasses import replace

import pytest
import torch

from tests.constants import section_of
from tests.trainer.golden.fixtures import cases
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import distill
from tuneloop.trainer.algorithms.terms import Targets

pytestmark = pytest.mark.contract


def _algorithm(**settings):
    given = {"algorithm_type": "distill", "distill": {"teacher_path": "/t"}, "kl_coef": 0.0}
    return section_of(AlgorithmSettings, given | settings)


def _loss(algorithm, targets, logprobs_BR):
    return distill.actor_loss(algorithm, targets, logprobs_BR, torch.zeros_like(logprobs_BR), targets.totals).value


@pytest.mark.parametrize("case", cases("distill"), ids=str)
def test_loss_and_gradient_are_verls(case):
    x = case.inputs
    targets = Targets(mask_BR=x["mask"], sampled_BR=x["sampled"], teacher_BR=x["teacher"])
    now = x["logprobs"].clone().requires_grad_()
    loss = _loss(_algorithm(**case.settings), targets, now)
    loss.backward()
    case.agrees(loss)
    case.agrees(now.grad, "grad")


def _expected(case, logits_BRV):
    """Our loss if each token of the vocabulary is said as often as the policy says it: its weight is that share."""
    logprobs_BRV, teacher_BRV = logits_BRV.log_softmax(-1), case.inputs["teacher"].log_softmax(-1)
    targets = Targets(mask_BR=case.inputs["mask"], sampled_BR=logits_BRV)
    total = 0.0
    for now_BR, teacher_BR in zip(logprobs_BRV.unbind(-1), teacher_BRV.unbind(-1), strict=True):
        sampled_BR = now_BR.detach()
        said = {"sampled_BR": sampled_BR, "teacher_BR": teacher_BR, "weights_BR": sampled_BR.exp()}
        total = total + _loss(_algorithm(), replace(targets, **said), now_BR)
    return total


@pytest.mark.parametrize("case", cases("reverse_kl"), ids=str)
def test_in_expectation_loss_and_gradient_are_those_of_the_divergence_over_the_whole_vocabulary(case):
    logits = case.inputs["logits"].clone().requires_grad_()
    loss = _expected(case, logits)
    loss.backward()
    case.agrees(loss)
    case.agrees(logits.grad, "grad")
