"""GRPO against worked examples."""

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


def test_all_calls_of_a_run_have_the_advantage_of_its_mean_reward():
    """Two calls of one run share a sequence, with a tool's token between them; the third stands alone."""
    of_BR = torch.tensor([[0, 0, -1, 1], [2, -1, -1, -1], [3, 3, -1, -1]])
    of = calls([0.0, 4.0, 5.0, 1.0], runs=[0, 0, 0, 1], groups=[0, 0, 0, 0], of_BR=of_BR)
    assert _advantages(of, scale="none").tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [-1, -1, 0, 0]]


def test_a_run_pays_for_the_divergence_of_all_its_tokens():
    """k2 of a difference of 2 is 2, times 0.5 a token: the first run pays 2 of its 4, the second 1."""
    of = calls([4.0, 0.0], groups=[0, 0], of_BR=torch.tensor([[0, -1, 0], [1, -1, -1]]))
    reference_BR = torch.full((2, 3), -2.0)
    given = targets(of, reference_BR=reference_BR)
    assert _advantages(of, given, scale="none").tolist() == [[1.5, 0, 1.5], [-1.5, 0, 0]]
