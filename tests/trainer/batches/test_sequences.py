"""Calls of a run as token sequences."""

import numpy as np
import pytest

from tests.trainer.factories import sample
from tuneloop.shared.experience import REDACTED
from tuneloop.trainer.batches.batch import TokenSequence, assemble, collate, superseded_calls


def _ids(*values):
    return np.array(values, dtype=np.int32)


def _said(number, prompt, reply, **but):
    logprobs = np.float32([-number] * len(reply))
    named = {"task_id": "t", "run_id": "r", "temperature": 1.0} | but
    return sample(number, prompt_ids=_ids(*prompt), completion_ids=_ids(*reply), logprobs=logprobs, **named)


FIRST = _said(1, [7, 8], [4, 5])
SECOND = _said(2, [7, 8, 4, 5, 9], [6], temperature=0.5)
THIRD = _said(3, [7, 8, 4, 5, 9, 6, 9, 9], [3, 2])


def test_calls_that_extend_each_other_become_one_sequence_in_which_only_replies_are_learnt_from():
    [sequence] = assemble([THIRD, FIRST, SECOND], merge=True)
    assert sequence.calls == (FIRST, SECOND, THIRD)
    assert sequence.ids.tolist() == [7, 8, 4, 5, 9, 6, 9, 9, 3, 2]
    assert sequence.of.tolist() == [-1, -1, 0, 0, -1, 1, -1, -1, 2, 2]
    assert sequence.sampled.tolist() == [0, 0, -1, -1, 0, -2, 0, 0, -3, -3]
    assert sequence.temperatures.tolist() == [1, 1, 1, 1, 1, 0.5, 1, 1, 1, 1]
    batch = collate([sequence])
    assert batch.replies_BR.tolist() == [[4, 5, 9, 6, 9, 9, 3, 2]]
    assert batch.calls_BR.tolist() == [[0, 0, -1, 1, -1, -1, 2, 2]]
    assert batch.predicts_BT.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 1, 1, 0]]
    assert batch.ids_BT[0, 1:][batch.predicts_BT[0, :-1]].tolist() == [4, 5, 6, 3, 2]


@pytest.mark.parametrize(
    "other",
    [
        _said(2, [7, 8, 4, 9], [6]),  # the history was changed
        _said(2, [7, 8, 4, 5, 9], [6], run_id="another"),
        _said(2, [7, 8, 4, 5, 9], [6], task_id="another"),
        _said(2, [7, 8, 4, 5, 9], [6], tenant="another"),
        _said(2, [7, 8, 4, 5, 9], [6], run_id=None),
    ],
)
def test_calls_that_do_not_belong_together_stay_apart(other):
    assert len(assemble([FIRST, other], merge=True)) == 2


def test_agents_that_take_turns_within_a_run_are_kept_apart_and_side_calls_are_alone():
    planner = [_said(1, [1, 7], [4]), _said(3, [1, 7, 4, 9], [5]), _said(6, [1, 7, 4, 9, 5, 9], [6])]
    solver = [_said(2, [2, 7], [4]), _said(4, [2, 7, 4, 9], [5]), _said(7, [2, 7, 4, 9, 5, 8], [6])]
    judge, same_words = _said(5, [3, 4, 5], [1]), _said(8, [4, 5], [1])
    sequences = assemble([*solver, judge, *planner, same_words], merge=True)
    assert sorted([call.id for call in each.calls] for each in sequences) == [[1, 3, 6], [2, 4, 7], [5], [8]]


def test_without_merging_each_call_is_a_sequence():
    assert [each.calls for each in assemble([FIRST, SECOND], merge=False)] == [(FIRST,), (SECOND,)]


def test_a_trajectory_that_branches_shares_no_token_of_two_branches():
    branch = _said(4, [7, 8, 4, 5, 1], [2])
    sequences = assemble([FIRST, SECOND, branch], merge=True)
    assert sorted(len(each.calls) for each in sequences) == [1, 2]
    assert sorted(call.id for each in sequences for call in each.calls) == [1, 2, 4]


def test_an_answer_that_nobody_went_on_from_was_asked_again():
    lost = _said(1, [7, 8], [1])
    taken = _said(2, [7, 8], [4, 5])
    onward = _said(3, [7, 8, 4, 5, 9], [6])
    assert superseded_calls([lost, taken, onward]) == [lost]


def test_choices_of_one_request_are_no_retries_but_for_the_one_that_was_gone_on_from():
    one, two = _said(1, [7], [1], msg_id="m", choice=0), _said(2, [7], [2], msg_id="m", choice=1)
    assert superseded_calls([one, two]) == []
    assert superseded_calls([one, two, _said(3, [7, 1, 9], [6], msg_id="n")]) == [two]


# What was redacted.


def test_a_redacted_token_is_read_as_another_and_not_learnt_from() -> None:
    ids, logprobs = np.int32([4, REDACTED, REDACTED, 6]), np.float32([-1, 0, 0, -2])
    alone = TokenSequence.alone(sample(1, prompt_ids=np.int32([7, REDACTED]), completion_ids=ids, logprobs=logprobs))
    assert alone.ids.tolist() == [7, 0, 4, 0, 0, 6]
    assert alone.of.tolist() == [-1, -1, 0, -1, -1, 0]
    assert alone.sampled.tolist() == [0, 0, -1, 0, 0, -2]
    batch = collate([alone])
    assert batch.mask_BR.tolist() == [[True, False, False, True]]
    assert batch.predicts_BT.tolist() == [[False, True, False, False, True, False]]


def test_calls_that_go_on_from_what_was_redacted_are_merged() -> None:
    first = sample(1, prompt_ids=np.int32([7]), completion_ids=np.int32([4, REDACTED]), logprobs=np.float32([-1, 0]))
    second = sample(
        2, prompt_ids=np.int32([7, 4, REDACTED, 9]), completion_ids=np.int32([5]), logprobs=np.float32([-1])
    )
    assert TokenSequence.alone(first).is_prefix_of(second)
    assert TokenSequence.alone(first).then(second).of.tolist() == [-1, 0, -1, -1, 1]
