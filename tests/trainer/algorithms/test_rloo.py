"""RLOO against its definition."""

import torch

from tests.trainer.calls import calls, targets
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import rloo


def _advantages(of):
    prepared, _ = rloo.prepare(AlgorithmSettings(algorithm_type="rloo"), targets(of), of, {})
    return prepared.advantages_BR


def test_a_run_is_compared_with_the_mean_of_the_others():
    """1 with the mean of 4 and 7, and so on; 3 with 0."""
    of = calls([1.0, 3.0, 4.0, 0.0, 7.0], groups=[0, 1, 0, 1, 0])
    assert _advantages(of)[:, 0].tolist() == [1 - 5.5, 3, 4 - 4, -3, 7 - 2.5]


def test_a_runs_calls_share_the_advantage_of_their_mean():
    of = calls([0.0, 2.0, 5.0], runs=[0, 0, 1], groups=[0, 0, 0], of_BR=torch.tensor([[0, -1, 1], [2, 2, -1]]))
    assert _advantages(of).tolist() == [[-4, 0, -4], [4, 4, 0]]


def test_a_runs_own_reward_does_not_move_its_baseline():
    """So the estimate has no bias: one more of reward is one more of advantage."""
    one, other = (_advantages(calls([mine, 0.5, 0.25], groups=[0, 0, 0]))[0, 0] for mine in (1.0, 2.0))
    assert (other - one).item() == 1
