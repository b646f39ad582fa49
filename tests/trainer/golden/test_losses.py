"""Losses and their gradients against those of verl, OpenRLHF, AReaL and TRL on the same numbers."""

import pytest
import torch

from tests.constants import section_of
from tests.trainer.golden.fixtures import cases
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.ppo import critic_loss
from tuneloop.trainer.algorithms.terms import Targets, Totals, importance_weights, kl, surrogate

pytestmark = pytest.mark.contract

OFF_POLICY = ("correction", "low", "high")
ELSEWHERE = {*OFF_POLICY, "loss_type"}


def _algorithm(case):
    """Theirs are ratios against the start of the step, beside importance weights from the sampling to it."""
    settings = {name: value for name, value in case.settings.items() if name not in ELSEWHERE}
    weights = {name: case.settings[name] for name in OFF_POLICY if name in case.settings}
    off_policy = {"correction": "none"} | weights | {"proximal": "recomputed"}
    return section_of(AlgorithmSettings, {"kl_coef": 0.0, "off_policy": off_policy} | settings)


def _targets(case, algorithm):
    x = case.inputs
    weights, _ = importance_weights(algorithm.off_policy, x["start"], x["sampled"], x["mask"])
    return Targets(
        mask_BR=x["mask"],
        sampled_BR=x["sampled"],
        start_BR=x["start"],
        reference_BR=x["reference"] if algorithm.kl_coef else None,
        advantages_BR=x["advantages"],
        weights_BR=weights,
    )


def _with_gradient(loss, of_BR):
    of_BR = of_BR.clone().requires_grad_()
    value = loss(of_BR)
    value.backward()
    return value.detach(), of_BR.grad


@pytest.mark.parametrize("case", [*cases("policy_loss"), *cases("trl_grpo")], ids=str)
def test_the_policy_loss_is_theirs(case):
    algorithm = _algorithm(case)
    targets = _targets(case, algorithm)
    loss, gradient = _with_gradient(
        lambda now: surrogate(algorithm, targets, now, torch.zeros_like(now), targets.totals).value,
        case.inputs["logprobs"],
    )
    case.agrees(loss)
    case.agrees(gradient, "grad")


@pytest.mark.parametrize("case", [case for case in cases("policy_loss") if "shares" in case.outputs], ids=str)
def test_so_is_each_micro_batchs_share_in_it(case):
    algorithm = _algorithm(case)
    targets, now = _targets(case, algorithm), case.inputs["logprobs"]
    shares = []
    for rows in case.outputs["rows"]:
        part = targets.rows(torch.tensor(rows), now)
        shares.append(surrogate(algorithm, part, now[rows], torch.zeros_like(now[rows]), targets.totals).value)
    case.agrees(torch.stack(shares), "shares")


def test_a_mean_per_micro_batch_is_not_theirs():
    """What the test above is there to find: the denominators of the micro-batch in the place of the mini-batch's."""
    case = next(case for case in cases("policy_loss") if "shares" in case.outputs)
    algorithm = _algorithm(case)
    targets, now = _targets(case, algorithm), case.inputs["logprobs"]
    shares = []
    for rows in case.outputs["rows"]:
        part = targets.rows(torch.tensor(rows), now)
        shares.append(surrogate(algorithm, part, now[rows], torch.zeros_like(now[rows]), part.totals).value / 3)
    assert abs(float(sum(shares)) - float(case.outputs["loss"])) > 1e-3


@pytest.mark.parametrize("case", cases("off_policy"), ids=str)
def test_the_importance_weights_are_theirs(case):
    x, algorithm = case.inputs, _algorithm(case)
    weights, _ = importance_weights(algorithm.off_policy, x["start"], x["sampled"], x["mask"])
    case.outputs["weights"] = torch.where(x["mask"], case.outputs["weights"], 0.0)
    case.agrees(weights, "weights")


@pytest.mark.parametrize("case", cases("divergences"), ids=str)
def test_the_divergences_are_theirs(case):
    estimator, x = case.settings["kl_estimator"], case.inputs
    each, gradient = kl(x["logprobs"], x["reference"], estimator), None
    _, gradient = _with_gradient(lambda now: kl(now, x["reference"], estimator).sum(), x["logprobs"])
    case.agrees(each, "each")
    case.agrees(gradient, "grad")


@pytest.mark.parametrize("case", cases("value_loss"), ids=str)
def test_the_value_loss_is_theirs(case):
    x, algorithm = case.inputs, section_of(AlgorithmSettings, case.settings)
    targets = Targets(mask_BR=x["mask"], sampled_BR=x["old"], values_BR=x["old"], returns_BR=x["returns"])
    totals = Totals(tokens=int(x["mask"].sum()), sequences=6, units=6)
    loss, gradient = _with_gradient(lambda now: critic_loss(algorithm, targets, now, totals).value, x["values"])
    case.agrees(loss)
    case.agrees(gradient, "grad")
