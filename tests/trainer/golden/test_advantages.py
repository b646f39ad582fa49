"""Advantages against those of verl, TRL, OpenRLHF and Trinity-RFT on the same numbers."""

import pytest
import torch

from tests.constants import section_of
from tests.trainer.calls import alone, calls, targets
from tests.trainer.golden.fixtures import cases
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import ALGORITHMS, reinforce_pp
from tuneloop.trainer.algorithms.terms import EPSILON, gae, whiten

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("case", cases("gae"), ids=str)
def test_whitened_advantages_and_returns_of_a_critic_are_verls(case):
    x = case.inputs
    advantages, returns = gae(x["rewards"], x["values"], x["mask"], **case.settings)
    case.agrees(whiten(advantages, x["mask"]), "advantages")
    case.agrees(returns, "returns")


@pytest.mark.parametrize("case", cases("reinforce_pp"), ids=str)
def test_reinforce_plus_plus_is_verls_with_the_divergence_in_the_reward_or_without(case):
    x = case.inputs
    of = alone(x["mask"], x["scores"])
    reference = x["reference"] if case.settings["kl_coef"] else None
    given = targets(of, sampled_BR=x["sampled"], reference_BR=reference)
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": "reinforce++"} | case.settings)
    prepared, _ = reinforce_pp.prepare(algorithm, given, of, {})
    case.agrees(prepared.advantages_BR, "advantages")
    case.agrees(prepared.returns_BR, "returns")


def _prepared(case, of):
    kind = case.settings["algorithm_type"]
    options = {"group": {"scale": case.settings.get("scale", "none")}, "baseline": {"kind": "batch"}}
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": kind, "kl_coef": 0.0} | options)
    prepared, _ = ALGORITHMS[kind].prepare(algorithm, targets(of), of, {})
    ours = prepared.advantages_BR[:, 0]
    if kind != "reinforce":
        return ours
    rewards = case.inputs["rewards"]  # OpenRLHF divides by no root mean square.
    return ours * ((rewards - rewards.mean()).square().mean().sqrt() + EPSILON)


def _deviations(case):
    """What theirs was divided by, before their epsilon was added."""
    rewards, groups = case.inputs["rewards"], case.inputs["groups"]
    if case.settings["scale"] == "batch":
        return rewards.std().expand_as(rewards)
    return torch.stack([rewards[groups == group].std() for group in groups])


@pytest.mark.parametrize("case", cases("groups"), ids=str)
def test_advantages_over_a_group_or_a_batch_are_theirs(case):
    """Ours is divided by the deviation and 1e-6, as verl's; TRL adds 1e-4, OpenRLHF 1e-9: no more than that differs."""
    ours = _prepared(case, calls(case.inputs["rewards"], groups=case.inputs["groups"].tolist()))
    if case.settings.get("scale", "none") != "none":
        apart = float((ours - case.outputs["advantages"]).abs().max())
        assert apart < {1e-6: 1e-8, 1e-4: 1e-3, 1e-9: 1e-5}[case.settings["epsilon"]]
        deviations = _deviations(case)
        ours = ours * (deviations + EPSILON) / (deviations + case.settings["epsilon"])
    case.agrees(ours, "advantages")


@pytest.mark.parametrize("case", cases("multi_step"), ids=str)
def test_the_advantages_of_runs_of_several_calls_are_trinitys(case):
    x = case.inputs
    case.agrees(
        _prepared(case, calls(x["rewards"], runs=x["runs"].tolist(), groups=x["groups"].tolist())), "advantages"
    )
