"""REINFORCE with a remembered baseline against worked examples."""

import pytest
import torch

from tests.constants import section_of
from tests.trainer.calls import calls, targets
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import reinforce


def _step(rewards, baselines=None, tasks=None, given=None, **baseline):
    """The advantages of a call each, and what is remembered."""
    of = calls(torch.tensor(rewards, dtype=torch.float64), tasks=tasks)
    options = {"kl_coef": 0.5, "kl_in": "reward", "baseline": {"decay": 0.5} | baseline}
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": "reinforce"} | options)
    prepared, after = reinforce.prepare(algorithm, given or targets(of), of, baselines or {})
    return prepared.advantages_BR[:, 0].tolist(), after


def _divided(*differences):
    """Differences from the baseline, divided by their root mean square."""
    scale = (sum(each**2 for each in differences) / len(differences)) ** 0.5
    return pytest.approx([each / scale for each in differences], abs=1e-5)


def test_the_first_batch_is_compared_with_its_own_mean():
    assert _step([0.0, 1.0, 2.0])[0] == _divided(-1, 0, 1)


def test_then_rewards_are_compared_with_what_came_before_them():
    """The means 1 and 4, the older one counting half as much: (1 + 2 x 4) / 3 = 3."""
    _, after = _step([0.0, 1.0, 2.0])
    advantages, after = _step([4.0, 5.0, 3.0], after)
    assert advantages == _divided(3, 4, 2)
    assert _step([5.0, 1.0, 3.0], after)[0] == _divided(2, -2, 0)


def test_what_was_remembered_before_is_left_as_it_was():
    """The learner goes back to it when a step was not finite."""
    _, before = _step([0.0, 1.0], tasks=["a", ""], kind="task")
    copy = dict(before)
    _step([5.0, 5.0], before, tasks=["a", "b"], kind="task")
    assert before == copy


def test_by_batch_nothing_before_matters():
    _, after = _step([0.0, 1.0, 2.0])
    assert _step([4.0, 6.0], after, kind="batch")[0] == _divided(-1, 1)


def test_a_tasks_own_mean_is_drawn_to_that_of_all_by_one_batch():
    """Of all: 2; of `easy`, once seen: 4; so 3 is expected of it, 2 of a task never seen and of a call of none."""
    _, after = _step([4.0, 4.0, 0.0, 0.0], tasks=["easy", "easy", "hard", ""], kind="task")
    tasks = ["easy", "hard", "new", ""]
    assert _step([3.0, 3.0, 3.0, 3.0], after, tasks=tasks, kind="task")[0] == _divided(0, 2, 1, 1)


def test_tasks_are_remembered_by_digests_and_the_longest_unseen_is_forgotten(monkeypatch):
    monkeypatch.setattr(reinforce, "MAX_TASKS", 2)
    _, after = _step([1.0, 2.0], {"rewards": (1.0, 1.0, 1.0)}, tasks=["t/ann's secret", "t/b"], kind="task")
    assert after.pop("rewards") == (1.0, 1.0, 1.0)  # What others remember stays.
    assert not any("secret" in name for name in after)
    first, second = list(after)[1:]
    _, after = _step([1.0, 5.0], after, tasks=["t/ann's secret", "t/c"], kind="task")
    assert first in after
    assert second not in after
    assert len(after) == 3
    assert list(_step([1.0], tasks=["t/a"], kind="running")[1]) == ["reinforce"]


def test_a_batch_that_is_better_than_before_all_alike_is_not_blown_up():
    """Divided by its deviation, 0, it would be."""
    _, after = _step([0.0, 1.0])
    assert _step([1.0, 1.0], after)[0] == pytest.approx([1, 1], abs=1e-5)


def test_a_call_pays_for_the_divergence_of_its_tokens():
    """k2 of a difference of 2 is 2, times 0.5 a token."""
    of = calls([4.0, 2.5])
    given = targets(of, sampled_BR=torch.zeros(2, 1).double(), reference_BR=torch.tensor([[-2.0], [0.0]]).double())
    assert _step([4.0, 2.5], given=given)[0] == _divided(0.25, -0.25)


def test_every_token_of_a_call_has_its_advantage_also_in_a_merged_sequence():
    of = calls([0.0, 4.0], of_BR=torch.tensor([[0, 0, -1, 1]]))
    prepared, _ = reinforce.prepare(AlgorithmSettings(), targets(of), of, {})
    assert prepared.advantages_BR.tolist() == [pytest.approx([-1, -1, 0, 1], abs=1e-5)]
