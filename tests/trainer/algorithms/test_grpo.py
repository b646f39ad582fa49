"""GRPO against worked examples."""

import pytest
import torch

from tests.constants import section_of
from tests.trainer.calls import calls, targets
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import grpo


def _advantages(of, given=None, **group):
    algorithm = section_of(
        AlgorithmSettings, {"algorithm_type": "grpo", "group": group, "kl_coef": 0.5, "kl_in": "reward"}
    )
    prepared, baselines = grpo.prepare(algorithm, given or targets(of), of, {"other": (1.0, 1.0, 1.0)})
    assert baselines == {"other": (1.0, 1.0, 1.0)}
    return prepared.advantages_BR


def test_a_run_is_compared_with_the_mean_of_its_group_in_its_deviations():
    """Deviations with n - 1: of 0 and 2 it is the root of 2, of 1, 1 and 4 the root of 3."""
    of = calls([0.0, 1.0, 2.0, 1.0, 4.0], groups=[7, 1, 7, 1, 1])
    expected = [-(2**-0.5), -(3**-0.5), 2**-0.5, -(3**-0.5), 2 * 3**-0.5]
    assert _advantages(of)[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_dr_grpo_divides_by_nothing():
    of = calls([0.0, 1.0, 2.0, 1.0, 4.0], groups=[7, 1, 7, 1, 1])
    assert _advantages(of, scale="none")[:, 0].tolist() == [-1, -1, 1, -1, 2]


def test_by_batch_the_deviation_is_of_all_scores_so_that_easy_tasks_are_not_blown_up():
    """Of 0, 2, 5 and 5.2; the second group's difference stays as small as it is."""
    of = calls(torch.tensor([0.0, 2.0, 5.0, 5.2], dtype=torch.float64), groups=[0, 0, 1, 1])
    deviation = torch.tensor([0.0, 2.0, 5.0, 5.2], dtype=torch.float64).std()
    expected = torch.tensor([-1.0, 1.0, -0.1, 0.1], dtype=torch.float64) / deviation
    torch.testing.assert_close(_advantages(of, scale="batch")[:, 0], expected, rtol=0, atol=1e-6)


def test_all_calls_of_a_run_have_the_advantage_of_its_mean_reward():
    """Two calls of one run share a sequence, with a tool's token between them; the third stands alone."""
    of_BR = torch.tensor([[0, 0, -1, 1], [2, -1, -1, -1], [3, 3, -1, -1]])
    of = calls([0.0, 4.0, 5.0, 1.0], runs=[0, 0, 0, 1], groups=[0, 0, 0, 0], of_BR=of_BR)
    assert _advantages(of, scale="none").tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [-1, -1, 0, 0]]


def test_a_run_counts_once_however_many_calls_it_has():
    of = calls([3.0, 3.0, 3.0, 0.0], runs=[0, 0, 0, 1], groups=[0, 0, 0, 0])
    assert _advantages(of, scale="none")[:, 0].tolist() == [1.5, 1.5, 1.5, -1.5]


def test_equal_scores_of_equal_calls_say_nothing_at_all():
    """The mean of three times a tenth is another number than a tenth."""
    rewards = torch.full((5,), 0.1)
    of = calls(rewards, runs=[0, 0, 0, 1, 2], groups=[0, 0, 0, 0, 0])
    assert _advantages(of)[:, 0].abs().max() < 1e-9


def test_a_run_pays_for_the_divergence_of_all_its_tokens():
    """k2 of a difference of 2 is 2, times 0.5 a token: the first run pays 2 of its 4, the second 1."""
    of = calls([4.0, 0.0], groups=[0, 0], of_BR=torch.tensor([[0, -1, 0], [1, -1, -1]]))
    reference_BR = torch.full((2, 3), -2.0)
    given = targets(of, reference_BR=reference_BR)
    assert _advantages(of, given, scale="none").tolist() == [[1.5, 0, 1.5], [-1.5, 0, 0]]
