"""The actor's whole loss with the ratio against the sampling, the default, and its entropy term: those of others."""

from dataclasses import replace

import pytest
import torch

from tests.constants import section_of
from tests.trainer.golden.fixtures import cases
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.terms import Targets, importance_weights, needs_start, surrogate
from tuneloop.trainer.batches.batch import scatter_tokens
from tuneloop.trainer.models.model import _logprobs

pytestmark = pytest.mark.contract

OFF_POLICY = ("correction", "low", "high")
SAMPLED = cases("sampled")
MASKED = [case for case in SAMPLED if "correction" in case.settings]


def _algorithm(case, **off_policy):
    """`off_policy` as it is by default, but for what the case says."""
    settings = {name: value for name, value in case.settings.items() if name not in {*OFF_POLICY, "loss_type"}}
    off_policy |= {name: case.settings[name] for name in OFF_POLICY if name in case.settings}
    return section_of(AlgorithmSettings, {"kl_coef": 0.0, "off_policy": off_policy} | settings)


def _targets(case, algorithm):
    """What the learner makes: nothing is known of the start of the step if nobody asks."""
    x = case.inputs
    reference_BR = x["reference"] if algorithm.kl_coef else None
    targets = Targets(
        mask_BR=x["mask"], sampled_BR=x["sampled"], reference_BR=reference_BR, advantages_BR=x["advantages"]
    )
    if not needs_start(algorithm.off_policy):
        return targets
    weights_BR, _ = importance_weights(algorithm.off_policy, x["start"], x["sampled"], x["mask"])
    return replace(targets, start_BR=x["start"], weights_BR=weights_BR)


def _loss(case, logprobs_BR, **off_policy):
    algorithm = _algorithm(case, **off_policy)
    targets = _targets(case, algorithm)
    return surrogate(algorithm, targets, logprobs_BR, torch.zeros_like(logprobs_BR), targets.totals).value


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_the_loss_against_the_sampling_is_theirs(case):
    assert _algorithm(case).off_policy.proximal == "sampled"
    now = case.inputs["logprobs"].clone().requires_grad_()
    loss = _loss(case, now)
    loss.backward()
    case.agrees(loss)
    case.agrees(now.grad, "grad")


@pytest.mark.parametrize("case", [case for case in SAMPLED if "correction" not in case.settings], ids=str)
def test_the_loss_against_the_start_of_the_step_is_not_theirs(case):
    """What the test above is there to find."""
    loss = _loss(case, case.inputs["logprobs"], proximal="recomputed", correction="none")
    assert abs(float(loss) - float(case.outputs["loss"])) > 1e-3


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_some_tokens_are_left_out_there_and_the_others_have_no_weight(case):
    weights_BR = _targets(case, _algorithm(case)).weights_BR
    assert weights_BR[case.inputs["mask"]].unique().tolist() == [0, 1]


def _textbook(case, logits_BRV):
    """Log-probabilities of what was said, and entropies, in float64."""
    logprobs_BRV = logits_BRV.log_softmax(-1)
    said_BR = logprobs_BRV.gather(-1, case.inputs["said"][..., None])[..., 0]
    return said_BR, -(logprobs_BRV.exp() * logprobs_BRV).sum(-1)


def _of_the_model(case, logits_BRV):
    """The same, in float32, as the trainer's model tells them; 0 outside the mask."""
    mask_BR = case.inputs["mask"]
    said_N, ones_N = case.inputs["said"][mask_BR], torch.ones(int(mask_BR.sum()))
    return tuple(
        scatter_tokens(each_N, mask_BR)
        for each_N in _logprobs(lambda each: each, logits_BRV[mask_BR], said_N, ones_N, None)
    )


@pytest.mark.parametrize("scored", [_textbook, _of_the_model])
@pytest.mark.parametrize("case", cases("entropy"), ids=str)
def test_the_loss_with_an_entropy_bonus_is_theirs_from_logits_on(case, scored):
    algorithm, logits = _algorithm(case), case.inputs["logits"].clone().requires_grad_()
    logprobs, entropy = scored(case, logits)
    targets = _targets(case, algorithm)
    loss = surrogate(algorithm, targets, logprobs, entropy, targets.totals).value.to(logprobs.dtype)
    loss.backward()
    case.agrees(loss)
    case.agrees(logits.grad.to(logprobs.dtype), "grad")
    case.outputs["entropy"] = torch.where(case.inputs["mask"], case.outputs["entropy"], 0.0)
    case.agrees(torch.where(case.inputs["mask"], entropy, 0.0), "entropy")


def test_the_entropy_bonus_is_not_nothing():
    case = cases("entropy")[0]
    without = _algorithm(case).model_copy(update={"entropy_coef": 0.0})
    logprobs, entropy = _textbook(case, case.inputs["logits"])
    targets = _targets(case, without)
    loss = surrogate(without, targets, logprobs, entropy, targets.totals).value
    assert abs(float(loss) - float(case.outputs["loss"])) > 1e-3
