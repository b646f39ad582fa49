"""REINFORCE++ against worked examples."""

import pytest
import torch

from tests.trainer.calls import calls, targets
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import reinforce_pp

#: Two calls in one sequence, a tool's token between them, and one alone.
OF_BR = torch.tensor([[0, 0, -1, 1], [2, -1, -1, -1]])


def _prepared(of, given=None, **but):
    algorithm = AlgorithmSettings(algorithm_type="reinforce++", **but)
    return reinforce_pp.prepare(algorithm, given or targets(of), of, {})[0]


def test_the_return_is_discounted_within_a_call_and_ends_with_it():
    of = calls([8.0, 4.0, 2.0], of_BR=OF_BR)
    assert _prepared(of, gamma=0.5).returns_BR.tolist() == [[4, 8, 0, 4], [2, 0, 0, 0]]


def test_rewarded_as_a_whole_a_trajectory_s_return_goes_back_over_all_its_calls():
    of = calls([8.0, 8.0, 2.0], of_BR=OF_BR)
    whole = {"ends_BR": torch.tensor([[False, False, False, True], [True, False, False, False]])}
    of = type(of)(**{name: getattr(of, name) for name in of.__slots__} | whole)
    assert _prepared(of, gamma=0.5).returns_BR.tolist() == [[2, 4, 0, 8], [2, 0, 0, 0]]


def test_a_token_pays_for_its_divergence_and_for_that_of_what_follows():
    """k1 of a difference of 1, times 0.5, a token."""
    of = calls([8.0, 4.0, 2.0], of_BR=OF_BR)
    given = targets(of, reference_BR=torch.full((2, 4), -1.0))
    paid = {"kl_in": "reward", "kl_coef": 0.5, "kl_estimator": "k1"}
    assert _prepared(of, given, **paid).returns_BR.tolist() == [[7, 7.5, 0, 3.5], [1.5, 0, 0, 0]]
    assert _prepared(of, given, **paid | {"kl_in": "loss"}).returns_BR.tolist() == [[8, 8, 0, 4], [2, 0, 0, 0]]


def test_advantages_are_whitened_over_all_tokens_of_the_batch():
    prepared = _prepared(calls([8.0, 4.0, 2.0], of_BR=OF_BR))
    inside = prepared.advantages_BR[OF_BR >= 0]
    assert inside.mean().item() == pytest.approx(0, abs=1e-6)
    assert inside.var().item() == pytest.approx(1)
    assert prepared.advantages_BR[OF_BR < 0].tolist() == [0, 0, 0, 0]
