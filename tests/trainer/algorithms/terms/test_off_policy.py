"""Importance weights, and what becomes of learning on stale replies without them."""

import math

import pytest
import torch

from tests.constants import section_of
from tuneloop.shared.settings.algorithm import AlgorithmSettings, OffPolicySettings
from tuneloop.trainer.algorithms.terms import Targets, importance_weights, needs_start, surrogate

MASK = torch.tensor([[True, True, False], [True, False, False]])
SAMPLED = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, 9.0, 9.0]])
START = SAMPLED + torch.tensor([[math.log(4.0), math.log(0.25), 5.0], [math.log(1.5), 5.0, 5.0]])


def test_weights_say_how_much_of_the_batch_counts():
    _, even = importance_weights(OffPolicySettings(proximal="recomputed"), SAMPLED, SAMPLED, MASK)
    assert (even["off_policy/weight_mean"], even["off_policy/effective_sample_size"]) == pytest.approx((1.0, 1.0))
    _, uneven = importance_weights(OffPolicySettings(proximal="recomputed"), START, SAMPLED, MASK)
    assert uneven["off_policy/weight_max"] == pytest.approx(4.0)
    cut = (2 + 0.25 + 1.5) ** 2 / (4 + 0.0625 + 2.25) / 3
    assert uneven["off_policy/effective_sample_size"] == pytest.approx(cut)
    _, masked = importance_weights(OffPolicySettings(correction="mask"), START, SAMPLED, MASK)
    assert masked["off_policy/effective_sample_size"] == pytest.approx(1 / 3)
    _, nothing = importance_weights(OffPolicySettings(correction="mask"), SAMPLED + 1.0, SAMPLED, MASK)
    assert (nothing["off_policy/outside"], nothing["off_policy/effective_sample_size"]) == (1.0, 0.0)


def test_an_absurd_ratio_is_a_finite_weight():
    far = torch.full((1, 1), 3e5)
    for each in (far, -far):
        weights, told = importance_weights(
            OffPolicySettings(proximal="recomputed"), each, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        )
        assert weights.isfinite().all()
        assert all(math.isfinite(value) for value in told.values())


@pytest.mark.parametrize(
    ("options", "needed"),
    [({}, False), ({"correction": "mask"}, True), ({"proximal": "recomputed"}, True), ({"correction": "none"}, False)],
)
def test_the_start_is_asked_for_only_where_it_counts(options, needed):
    assert needs_start(OffPolicySettings(**options)) is needed


def _learnt(*, correction, proximal="recomputed", clip_range_high=0.2):
    """The final expected reward of a bandit of four arms: arm 0 pays 1, and arm 1, sampled most often, pays 0.6."""
    torch.manual_seed(0)
    behaviour = torch.tensor([0.04, 0.9, 0.03, 0.03])
    rewards = torch.tensor([1.0, 0.6, 0.0, 0.0])
    options = section_of(OffPolicySettings, dict(correction=correction, proximal=proximal, low=0.0, high=50.0))
    algorithm = AlgorithmSettings(off_policy=options, kl_coef=0.0, dual_clip=None, clip_range_high=clip_range_high)
    logits = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.2)
    for _ in range(150):
        arms = torch.multinomial(behaviour, 256, replacement=True)
        sampled, mask = behaviour.log()[arms][:, None], torch.ones(256, 1, dtype=torch.bool)
        start = logits.detach().log_softmax(0)[arms][:, None]
        expected = (logits.detach().softmax(0) * rewards).sum()
        weights, _ = importance_weights(options, start, sampled, mask)
        targets = Targets(
            mask_BR=mask,
            sampled_BR=sampled,
            start_BR=start,
            advantages_BR=(rewards[arms] - expected)[:, None],
            weights_BR=weights,
        )
        loss = surrogate(algorithm, targets, logits.log_softmax(0)[arms][:, None], torch.zeros(256, 1), targets.totals)
        optimizer.zero_grad()
        torch.autograd.backward(loss.value)
        optimizer.step()
    return float((logits.detach().softmax(0) * rewards).sum())


def test_stale_replies_teach_the_right_thing_only_with_the_correction():
    assert _learnt(correction="truncate") > 0.85
    assert _learnt(correction="none") < 0.65


def test_the_ratio_against_what_was_sampled_is_a_correction_by_itself():
    assert _learnt(correction="truncate", proximal="sampled", clip_range_high=50.0) > 0.85


def test_with_the_ratio_against_what_was_sampled_a_mask_counts_no_weight_twice():
    weights, told = importance_weights(OffPolicySettings(correction="mask"), START, SAMPLED, MASK)
    assert weights.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert told["off_policy/outside"] == pytest.approx(2 / 3)
