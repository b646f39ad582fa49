"""PPO's losses against worked examples."""

import math
from dataclasses import replace

import pytest
import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.ppo import prepare
from tuneloop.trainer.algorithms.terms import CallRewards, Targets, Totals, surrogate
from tuneloop.trainer.algorithms.terms import clipped_policy_loss as policy_loss


def _targets(reference=None):
    return Targets(
        mask_BR=torch.tensor([[True, True], [True, False]]),
        sampled_BR=torch.tensor([[-1.0, -2.0], [-1.0, 0.0]]),
        reference_BR=reference,
        values_BR=torch.zeros(2, 2),
        advantages_BR=torch.tensor([[1.0, -1.0], [2.0, 0.0]]),
        returns_BR=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
    )


TOTALS = Totals(tokens=3, sequences=2, units=2)


def test_an_absurd_ratio_stays_finite():
    loss, _ = policy_loss(torch.tensor([300.0, -300.0]), torch.tensor([-1.0, 1.0]), low=0.2, high=0.2, dual=None)
    assert loss.isfinite().all()


def test_the_mismatch_is_how_far_the_sampling_distribution_is_from_the_current_one():
    """One token of three is now half as likely: (0.5 - 1 - log 0.5) / 3."""
    now = _targets().sampled_BR + torch.tensor([[math.log(0.5), 0.0], [0.0, 0.0]])
    _, metrics = surrogate(AlgorithmSettings(), _targets(), now, torch.zeros(2, 2), TOTALS)
    assert metrics["mismatch_kl/mean"].item() == pytest.approx((0.5 - 1 + math.log(2)) / 3)


def _rewarded(*rewards):
    """Sequences of one token, sampled with log-probability 0."""
    rows = torch.arange(len(rewards))
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    calls = CallRewards(
        rewards_C=torch.tensor(rewards),
        rows_C=rows,
        runs_C=rows,
        groups_C=rows,
        last_C=mask[:, 0],
        tasks=("",) * len(rewards),
        of_BR=rows[:, None],
        ends_BR=mask,
    )
    nothing = torch.zeros(len(rewards), 1)
    return Targets(mask_BR=mask, sampled_BR=nothing, values_BR=nothing), calls


def test_where_all_are_rewarded_alike_the_critic_s_error_is_not_whitened_into_advantages():
    targets, calls = _rewarded(1.0, 1.0, 1.0)
    unsure = replace(targets, values_BR=torch.tensor([[0.99], [1.0], [1.01]]))
    prepared, _ = prepare(AlgorithmSettings(), unsure, calls, {})
    assert prepared.advantages_BR.tolist() == [[0.0], [0.0], [0.0]]
    assert prepared.returns_BR.tolist() == [[1.0], [1.0], [1.0]]
