"""What each call is rewarded with."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.constants import section_of
from tests.factories import exchange, experience, feedback
from tests.trainer.factories import sample
from tuneloop.shared.experience import REDACTED, pack_ids
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.trainer.batches.batch import assemble, calls_of, collate


def _trajectory(*rewards, run="r", first=1):
    """Calls of two tokens each, with one of the tool's between them."""
    calls, history = [], [7]
    for number, reward in enumerate(rewards):
        reply = [1, 2]
        calls.append(
            sample(
                first + number,
                task_id="t",
                run_id=run,
                group_id=1,
                prompt_ids=np.array(history, np.int32),
                completion_ids=np.array(reply, np.int32),
                logprobs=np.zeros(2, np.float32),
                reward=reward,
            )
        )
        history += [*reply, 9]
    return calls


def _calls(samples, *, merge=True, limit=None, **algorithm):
    sequences = assemble(samples, merge=merge)
    return calls_of(section_of(AlgorithmSettings, algorithm), sequences, collate(sequences), limit)


@pytest.mark.parametrize(
    ("credit", "paid"),
    [
        ("call", [0, 1, 0, 0, 2, 0, 0, 3]),
        ("trajectory", [0, 0, 0, 0, 0, 0, 0, 3]),
        ("discounted", [0, 0.75, 0, 0, 1.5, 0, 0, 3]),
    ],
)
def test_credit_is_paid_where_the_settings_say(credit, paid):
    calls = _calls(_trajectory(1.0, 2.0, 3.0), credit=credit, turn_discount=0.5)
    assert calls.paid_BR.tolist() == [paid]


@pytest.mark.parametrize("credit", ["call", "trajectory", "discounted"])
def test_merging_changes_no_call_s_credit(credit):
    samples = [*_trajectory(1.0, 2.0, 3.0), *_trajectory(5.0, 0.0, run="q", first=10)]
    merged = _calls(samples, credit=credit)
    apart = _calls(samples, credit=credit, merge=False)
    assert merged.rewards_C.tolist() == apart.rewards_C.tolist()
    assert merged.last_C.tolist() == apart.last_C.tolist() == [False, False, True, False, True]
    assert merged.rows_C.tolist() == [0, 0, 0, 1, 1]
    assert merged.runs_C.tolist() == apart.runs_C.tolist() == [0, 0, 0, 1, 1]
    assert merged.groups_C.tolist() == [0] * 5


def test_tokens_of_tools_get_nothing():
    calls = _calls(_trajectory(1.0, 2.0))
    assert calls.spread(torch.tensor([5.0, 6.0])).tolist() == [[5, 5, 0, 6, 6]]


def test_a_long_reply_is_punished_softly_before_its_limit():
    """Replies of two tokens; DAPO's punishment over the last two before the limit."""
    options = {"overlong": {"buffer": 2}}
    for limit, expected in ((4, 1.0), (3, 0.5), (2, 0.0), (1, 0.0), (None, 1.0)):
        calls = _calls(_trajectory(1.0), limit=limit, **options)
        assert calls.rewards_C.tolist() == [expected]


def test_each_call_is_punished_by_itself_after_it_was_credited():
    calls = _calls(_trajectory(0.0, 0.0, 9.0), limit=3, turn_discount=0.1, overlong={"buffer": 2}, credit="discounted")
    assert calls.rewards_C.tolist() == pytest.approx([0.09 - 0.5, 0.9 - 0.5, 9.0 - 0.5])


def test_a_call_with_redacted_tokens_is_paid_once_at_its_last_token_that_is_learnt():
    [call] = _trajectory(2.0)
    ids = np.array([1, REDACTED, 2, REDACTED], np.int32)
    [other, _] = _trajectory(1.0, 0.0, run="q", first=5)
    calls = _calls([replace(call, completion_ids=ids, logprobs=np.zeros(4, np.float32)), other], merge=False)
    assert calls.paid_BR.tolist() == [[0, 0, 2, 0], [0, 1, 0, 0]]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("run_feedback", "credit", "paid"),
    [
        ("fallback", "call", [0.1, 0.2]),
        ("fallback", "trajectory", [0.0, 0.2]),
        ("fallback", "discounted", [0.1, 0.2]),
        ("add", "call", [1.1, 1.2]),
        ("add", "trajectory", [0.0, 1.2]),
        ("add", "discounted", [0.6, 1.2]),
    ],
)
def test_feedback_on_two_calls_and_their_run_is_paid_as_the_documentation_says(engine, run_feedback, credit, paid):
    run = {"task_id": "t", "run_id": "r"}
    ledger = Ledger(engine, rule=RewardRule(run_feedback=run_feedback, clip=(-2.0, 2.0)))
    first = exchange(experiences=(experience(prompt_ids=pack_ids([7])),), **run)
    second = exchange(experiences=(experience(prompt_ids=pack_ids([7, 4, 5, 9])),), **run)
    said = [feedback(msg_id=first.msg_id, value=0.1), feedback(msg_id=second.msg_id, value=0.2)]
    ledger.recording.record([first, second, *said, feedback(msg_id=None, value=1.0, **run)])
    ledger.recording.commit("acme")
    calls = _calls(
        ledger.training.lease(ledger.training.take_epoch("trainer"), 2, BatchRules()), credit=credit, turn_discount=0.5
    )
    assert calls.paid_BR[0, [1, 4]].tolist() == pytest.approx(paid)
    assert calls.paid_BR.sum().item() == pytest.approx(sum(paid))
