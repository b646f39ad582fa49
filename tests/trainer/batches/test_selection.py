"""Which samples can be trained on, and why the others cannot."""

import msgspec
import numpy as np
import pytest

from tests.trainer.conftest import VOCABULARY
from tests.trainer.factories import sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.batches.batch import of_samples
from tuneloop.trainer.batches.selection import select, sort_out, untrainable

PPO = AlgorithmSettings()


def _ids(*values):
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("but", "word"),
    [
        ({"completion_ids": _ids(), "logprobs": np.float32([])}, "no tokens"),
        ({"prompt_ids": _ids()}, "prompt"),
        ({"completion_ids": _ids(1, 2), "logprobs": np.float32([-1])}, "per token"),
        ({"completion_ids": _ids(1, 2), "logprobs": np.float32([-1, -np.inf])}, "not finite"),
        ({"completion_ids": _ids(1, 2), "logprobs": np.float32([-1, np.nan])}, "not finite"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": float("-inf")}, "reward"),
        ({"reward": 1e30}, "reward"),
        ({"temperature": 0.0}, "temperature"),
        ({"prompt_ids": _ids(VOCABULARY)}, "vocabulary"),
        ({"prompt_ids": _ids(-2)}, "vocabulary"),
        ({"prompt_ids": _ids(5, -1)}, "redacted"),
        ({"completion_ids": _ids(5, -1), "logprobs": np.float32([-1, 0])}, "redacted"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_says_why(but, word):
    reason = untrainable(sample(**but), PPO, vocabulary=VOCABULARY)
    assert reason is not None
    assert word in reason


def test_what_cannot_be_trained_on_is_sorted_out_by_its_reason():
    good, hot, other = sample(1), sample(2, temperature=0.0), sample(3, temperature=0.0)
    kept, refused = sort_out([good, hot, other], PPO, vocabulary=250, group_by="none")
    assert kept == [good]
    assert list(refused.values()) == [[hot, other]]


def test_a_run_that_is_left_alone_in_its_group_goes_too():
    pair = [sample(number, group_id=1, task_id="a", run_id=str(number)) for number in (1, 2)]
    calls = [sample(number, group_id=3, task_id="b", run_id="one") for number in (3, 4)]
    cold = sample(5, group_id=3, task_id="b", run_id="two", temperature=0.0)
    kept, refused = sort_out([*pair, *calls, cold], PPO, vocabulary=250, group_by="task")
    assert kept == pair
    assert sorted(each.id for group in refused.values() for each in group) == [3, 4, 5]


def test_of_a_group_that_is_not_whole_nothing_is_kept_where_the_settings_say_so():
    whole, partial = _group([0.0, 1.0, 0.5]), _group([0.0, 1.0, 0.5], first=10)
    partial[2] = msgspec.structs.replace(partial[2], temperature=0.0)
    given = {"vocabulary": 250, "group_by": "task"}
    kept, refused = sort_out([*whole, *partial], PPO, least_runs=3, **given)
    assert kept == whole
    assert refused["fewer than 3 runs of its group are left: the others cannot be trained on"] == partial[:2]
    assert sort_out([*whole, *partial], PPO, **given)[0] == [*whole, *partial[:2]]


def test_the_share_of_groups_that_are_not_whole_is_a_curve():
    samples = [*_group([0.0, 1.0, 0.5]), *_group([0.0, 1.0], first=10)]
    assert of_samples(samples, version=1, group_size=3)["groups/partial"] == 0.5
    assert "groups/partial" not in of_samples(samples, version=1)


def test_imitation_needs_no_sampling():
    cold = sample(1, temperature=0.0, logprobs=np.full_like(sample(1).logprobs, np.nan))
    for method in ("sft", "raft", "dpo", "kto"):
        assert untrainable(cold, AlgorithmSettings(algorithm_type=method), vocabulary=VOCABULARY) is None


def _group(rewards, first=0):
    return [
        sample(first + i, group_id=first, task_id=str(first), run_id=str(i), reward=reward)
        for i, reward in enumerate(rewards)
    ]


def test_a_group_that_is_rewarded_alike_is_left_out_by_methods_that_compare():
    alike, mixed = _group([1.0, 1.0, 1.0]), _group([0.0, 1.0], first=10)
    kept, refused = sort_out(
        [*alike, *mixed], AlgorithmSettings(algorithm_type="grpo"), vocabulary=250, group_by="task"
    )
    assert kept == mixed
    assert list(refused.values()) == [alike]
    assert sort_out([*alike, *mixed], PPO, vocabulary=250, group_by="task") == ([*alike, *mixed], {})


def test_calls_that_were_asked_again_are_left_out_of_a_trajectory():
    first = sample(1, task_id="t", run_id="r")
    again = sample(2, task_id="t", run_id="r", prompt_ids=first.prompt_ids)
    onward = sample(3, task_id="t", run_id="r", prompt_ids=np.concatenate([again.prompt_ids, again.completion_ids]))
    kept, refused = sort_out([first, again, onward], PPO, vocabulary=250, group_by="run")
    assert kept == [again, onward]
    assert list(refused.values()) == [[first]]
    assert sort_out([first, again, onward], PPO, vocabulary=250, group_by="none")[1] == {}


def test_an_edited_answer_is_not_left_out_because_the_run_went_on_from_what_was_sampled(settings):
    first = sample(1, task_id="t", run_id="r", demonstration="better")
    again = sample(2, task_id="t", run_id="r", prompt_ids=first.prompt_ids, demonstration="worse")
    onward = sample(3, task_id="t", run_id="r", prompt_ids=np.concatenate([first.prompt_ids, first.completion_ids]))
    chosen = settings(algorithm={"algorithm_type": "sft", "sft": {"least_reward": -1}}, buffer={"group_by": "run"})
    kept, refused = select([first, again, onward], chosen, vocabulary=VOCABULARY)
    assert [each.id for each in kept] == [1, 3]
    assert kept[0].completion_ids.tolist() != first.completion_ids.tolist()
    assert [[each.id for each in left] for left in refused.values()] == [[2]]
