"""multi_step_grpo against worked examples."""

import pytest
import torch

from tests.constants import section_of
from tests.trainer.calls import calls, targets
from tests.trainer.factories import sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.algorithms import multi_step_grpo
from tuneloop.trainer.batches.selection import sort_out

OF_BR = torch.tensor([[0, 0, -1, 1], [2, -1, -1, -1]])


def _advantages(of, **group):
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": "multi_step_grpo", "group": group})
    return multi_step_grpo.prepare(algorithm, targets(of), of, {})[0].advantages_BR


def test_a_run_is_judged_by_its_last_call_and_all_its_calls_learn_from_that():
    of = calls([9.0, 2.0, 0.0], runs=[0, 0, 1], groups=[0, 0, 0], of_BR=OF_BR)
    assert _advantages(of, scale="none").tolist() == [[1, 1, 0, 1], [-1, 0, 0, 0]]
    expected = [[2**-0.5, 2**-0.5, 0, 2**-0.5], [-(2**-0.5), 0, 0, 0]]
    assert _advantages(of).tolist() == [pytest.approx(row, abs=1e-5) for row in expected]


def test_the_last_call_is_the_last_sampled_wherever_it_stands():
    of = calls([9.0, 2.0, 0.0], runs=[0, 0, 1], groups=[0, 0, 0], of_BR=OF_BR)
    other_way_round = calls([2.0, 9.0, 0.0], runs=[0, 0, 1], groups=[0, 0, 0], of_BR=OF_BR)
    assert _advantages(of, scale="none")[0, 0] != _advantages(other_way_round, scale="none")[0, 0]


@pytest.mark.parametrize(("kind", "credit"), [("multi_step_grpo", "call"), ("grpo", "trajectory")])
def test_groups_are_constant_by_what_their_runs_are_judged_by(kind, credit):
    """Runs rewarded 0, 1 and 1, 0 have one mean; 1, 2 and 0, 2 have one last reward."""
    rewards = {"a": (0.0, 1.0), "b": (1.0, 0.0)}
    same_last = {"c": (1.0, 2.0), "d": (0.0, 2.0)}
    samples = [
        sample(number * 10 + call, task_id=task, run_id=run, group_id=group, reward=reward)
        for group, (task, runs) in enumerate((("t", rewards), ("u", same_last)))
        for number, (run, each) in enumerate(runs.items(), start=2 * group)
        for call, reward in enumerate(each)
    ]
    algorithm = section_of(AlgorithmSettings, {"algorithm_type": kind, "credit": credit})
    kept, refused = sort_out(samples, algorithm, vocabulary=300, group_by="task")
    assert {each.task_id for each in kept} == {"t"}
    assert [each.task_id for left in refused.values() for each in left] == ["u"] * 4
    by_means, _ = sort_out(samples, AlgorithmSettings(algorithm_type="grpo"), vocabulary=300, group_by="task")
    assert {each.task_id for each in by_means} == {"u"}
