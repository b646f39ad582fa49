"""PPO's losses against worked examples."""

import math
from dataclasses import replace

import pytest
import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.ppo import critic_loss, prepare, value_loss
from tuneloop.trainer.algorithms.terms.policy_loss import clipped_policy_loss as policy_loss
from tuneloop.trainer.algorithms.terms.policy_loss import surrogate
from tuneloop.trainer.algorithms.terms.targets import CallRewards, Targets, Totals

TOTALS = Totals(tokens=3, sequences=2, units=2)


def _policy(ratio, advantage, **but):
    settings = {"low": 0.2, "high": 0.28, "dual": 3.0} | but
    loss, clipped = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), **settings)
    return loss.item(), clipped.item()


def test_inside_the_clip_the_loss_is_minus_ratio_times_advantage():
    assert _policy(1.1, 2.0) == (pytest.approx(-2.2), False)


def test_a_ratio_gone_too_far_up_with_a_good_token_is_clipped_at_high():
    assert _policy(1.5, 2.0) == (pytest.approx(-2.56), True)


def test_a_ratio_gone_too_far_down_with_a_bad_token_is_clipped_at_low():
    assert _policy(0.5, -1.0) == (pytest.approx(0.8), True)


def test_a_ratio_that_went_the_wrong_way_is_not_clipped():
    assert _policy(0.5, 2.0) == (pytest.approx(-1.0), False)
    assert _policy(2.0, -1.0) == (pytest.approx(2.0), False)


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    assert _policy(8.0, -1.0) == (pytest.approx(3.0), False)
    assert _policy(8.0, -1.0, dual=None) == (pytest.approx(8.0), False)
    assert _policy(8.0, 1.0)[0] == pytest.approx(-1.28)


def test_an_absurd_ratio_stays_finite():
    loss, _ = policy_loss(torch.tensor([300.0, -300.0]), torch.tensor([-1.0, 1.0]), low=0.2, high=0.2, dual=None)
    assert loss.isfinite().all()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (0.3, 0.0, 1.0, 0.245, False),  # (0.3 - 1)^2 / 2
        (0.9, 0.0, 1.0, 0.125, True),  # held at 0.5: (0.5 - 1)^2 / 2
        (2.0, 0.0, 1.0, 0.5, False),  # gone past the target: (2 - 1)^2 / 2, more than 0.125
    ],
)
def test_the_value_loss_is_the_worse_of_the_free_and_the_held_value(value, old, target, loss, clipped):
    each, held = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), clip_range=0.5)
    assert (each.item(), held.item()) == (pytest.approx(loss), clipped)


def _targets(reference=None):
    return Targets(
        mask_BR=torch.tensor([[True, True], [True, False]]),
        sampled_BR=torch.tensor([[-1.0, -2.0], [-1.0, 0.0]]),
        reference_BR=reference,
        values_BR=torch.zeros(2, 2),
        advantages_BR=torch.tensor([[1.0, -1.0], [2.0, 0.0]]),
        returns_BR=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
    )


def test_the_actor_loss_adds_policy_divergence_and_entropy_each_as_a_mean_over_tokens():
    algorithm = AlgorithmSettings(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    reference = torch.tensor([[-2.0, -2.0], [-1.0, 7.0]])
    loss, metrics = surrogate(algorithm, _targets(reference), _targets().sampled_BR, torch.full((2, 2), 3.0), TOTALS)
    assert loss.item() == pytest.approx(-2 / 3 + 0.1 * 0.5 / 3 - 0.01 * 3)
    assert metrics["actor/pg_loss"].item() == pytest.approx(-2 / 3)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5 / 3)
    assert metrics["actor/entropy"].item() == pytest.approx(3.0)
    assert metrics["actor/ppo_kl"].item() == metrics["mismatch_kl/mean"].item() == 0


def test_without_a_reference_there_is_no_divergence():
    loss, metrics = surrogate(
        AlgorithmSettings(kl_coef=0.1), _targets(), _targets().sampled_BR, torch.zeros(2, 2), TOTALS
    )
    assert loss.item() == pytest.approx(-2 / 3)
    assert "actor/kl_loss" not in metrics


def test_the_mismatch_is_how_far_the_sampling_distribution_is_from_the_current_one():
    """One token of three is now half as likely: (0.5 - 1 - log 0.5) / 3."""
    now = _targets().sampled_BR + torch.tensor([[math.log(0.5), 0.0], [0.0, 0.0]])
    _, metrics = surrogate(AlgorithmSettings(), _targets(), now, torch.zeros(2, 2), TOTALS)
    assert metrics["mismatch_kl/mean"].item() == pytest.approx((0.5 - 1 + math.log(2)) / 3)


def test_the_critic_loss_is_a_mean_over_tokens():
    loss, metrics = critic_loss(AlgorithmSettings(), _targets(), torch.zeros(2, 2), TOTALS)
    assert loss.item() == metrics["critic/vf_loss"].item() == pytest.approx(1 / 3)


def test_the_loss_is_the_sum_of_its_micro_batches():
    targets, now = _targets(), torch.tensor([[-1.1, -1.7], [-0.6, 0.0]])
    whole = surrogate(AlgorithmSettings(), targets, now, torch.ones(2, 2), TOTALS).value
    rows = [torch.tensor([0]), torch.tensor([1])]
    parts = [
        surrogate(AlgorithmSettings(), targets.rows(row, now[row]), now[row], torch.ones(1, 2), TOTALS).value
        for row in rows
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_advantages_are_whitened_but_returns_are_not():
    targets, calls = _rewarded(1.0, 3.0)
    whitened, _ = prepare(AlgorithmSettings(), targets, calls, {})
    assert whitened.returns_BR.tolist() == [[1.0], [3.0]]
    torch.testing.assert_close(whitened.advantages_BR, torch.tensor([[-(0.5**0.5)], [0.5**0.5]]))


def test_a_divergence_in_the_reward_is_taken_from_each_token():
    targets, calls = _rewarded(1.0, 3.0)
    away = replace(targets, reference_BR=torch.full((2, 1), -2.0))
    algorithm = AlgorithmSettings(kl_in="reward", kl_estimator="k1", kl_coef=0.5)
    charged, _ = prepare(algorithm, away, calls, {})
    assert charged.returns_BR.tolist() == [[0.0], [2.0]]


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
