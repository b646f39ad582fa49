"""Pairs: each reply in at most one, and what is left over says why."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.constants import section_of
from tests.trainer.conftest import VOCABULARY
from tests.trainer.factories import sample
from tuneloop.shared.settings.algorithm import AlgorithmSettings
from tuneloop.trainer.batches.selection import make_pairs, sort_out

PROMPT = np.array([1, 2, 3], np.int32)


def _reply(number, reward, *, group=1, prompt=PROMPT, **but):
    return sample(number, reward=reward, group_id=group, prompt_ids=prompt, **but)


def _ids(samples):
    return [each.id for each in samples]


def _left(refused):
    return {reason: sorted(_ids(samples)) for reason, samples in refused.items()}


def test_the_best_goes_with_the_worst_and_the_second_with_the_second():
    pairs, refused = make_pairs([_reply(0, 0.2), _reply(1, 0.9), _reply(2, 0.1), _reply(3, 0.5)])
    assert _ids(pairs) == [1, 2, 3, 0]
    assert refused == {}


def test_equal_rewards_are_no_pair():
    pairs, refused = make_pairs([_reply(0, 1.0), _reply(1, 1.0), _reply(2, 0.0), _reply(3, 1.0)])
    assert _ids(pairs) == [0, 2]
    assert _left(refused) == {"no pair: another reply to its prompt has the same reward": [1, 3]}


def test_other_prompts_of_the_group_are_no_rivals():
    other = np.array([1, 2, 4], np.int32)
    pairs, refused = make_pairs([_reply(0, 1.0), _reply(1, 0.0, prompt=other)])
    assert pairs == []
    assert _left(refused) == {"no pair: its group's other replies are to other prompts": [0, 1]}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1)), max_size=12))
def test_every_reply_is_in_one_pair_or_left_over_once(drawn):
    prompts = [PROMPT, np.array([9], np.int32)]
    samples = [_reply(i, float(reward), group=group, prompt=prompts[p]) for i, (group, reward, p) in enumerate(drawn)]
    pairs, refused = make_pairs(samples)
    seen = _ids(pairs) + [each.id for left in refused.values() for each in left]
    assert sorted(seen) == list(range(len(samples)))
    for better, worse in zip(pairs[::2], pairs[1::2], strict=True):
        assert better.reward > worse.reward
        assert better.group_id == worse.group_id
        assert better.prompt_ids.tobytes() == worse.prompt_ids.tobytes()


def test_selection_makes_pairs_for_dpo_of_what_can_be_trained_on():
    dpo = section_of(AlgorithmSettings, {"algorithm_type": "dpo"})
    broken = _reply(2, 0.0, group=2, completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    samples = [_reply(0, 0.0), _reply(1, 1.0), broken, _reply(3, 1.0, group=2)]
    kept, refused = sort_out(samples, dpo, vocabulary=VOCABULARY, group_by="preference")
    assert _ids(kept) == [1, 0]
    assert _left(refused) == {
        "the reply has no tokens": [2],
        "no pair: the other replies of its group cannot be trained on": [3],
    }
