"""PPO's losses against worked examples."""

from dataclasses import replace

import torch

from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms.ppo import prepare
from tuneloop.trainer.algorithms.terms.policy_loss import clipped_policy_loss as policy_loss
from tuneloop.trainer.algorithms.terms.targets import CallRewards, Targets


def test_an_absurd_ratio_stays_finite():
    loss, _ = policy_loss(torch.tensor([300.0, -300.0]), torch.tensor([-1.0, 1.0]), low=0.2, high=0.2, dual=None)
    assert loss.isfinite().all()


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
