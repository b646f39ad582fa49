"""Samples as tensors."""

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tuneloop.trainer.batches.batch import TokenSequence, assemble, collate, micro_batches, mini_batches, scatter_tokens


def _ids(*values):
    return np.array(values, dtype=np.int32)


def test_prompt_and_reply_lie_side_by_side():
    one = sample(
        prompt_ids=_ids(7, 8, 9), completion_ids=_ids(4, 5), logprobs=np.float32([-1, -2]), reward=0.5, temperature=0.7
    )
    two = sample(
        prompt_ids=_ids(1), completion_ids=_ids(2, 3, 6), logprobs=np.float32([-1, -1, -3]), reward=1, temperature=1.0
    )
    batch = collate([TokenSequence.alone(one), TokenSequence.alone(two)])
    assert batch.ids_BT.tolist() == [[7, 8, 9, 4, 5], [1, 2, 3, 6, 0]]
    assert batch.predicts_BT.int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert batch.replies_BR.tolist() == [[4, 5, 0], [2, 3, 6]]
    assert batch.mask_BR.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.sampled_BR.tolist() == [[-1, -2, 0], [-1, -1, -3]]
    assert batch.calls_BR.tolist() == [[0, 0, -1], [1, 1, 1]]
    assert batch.temperatures_BR.tolist() == [pytest.approx([0.7, 0.7, 1.0]), [1.0, 1.0, 1.0]]
    assert (batch.lengths_B.tolist(), batch.tokens) == ([5, 4], 5)


def test_chosen_rows_lose_the_padding_they_do_not_need():
    batch = collate(assemble([sample(i) for i in range(6)], merge=False))
    shortest = int(batch.lengths_B.argmin())
    alone, again = batch.rows(torch.tensor([shortest])), collate([TokenSequence.alone(sample(shortest))])
    assert (alone.held_BR, alone.allowed_KW) == (None, None)  # no grammar held any
    for name in set(batch.__slots__) - {"held_BR", "allowed_KW", "left_LS"}:
        if name != "calls_BR":  # which counts through the whole batch
            assert torch.equal(getattr(alone, name), getattr(again, name))


def test_numbers_per_token_return_to_their_places():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert scatter_tokens(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[1, 2, 0], [3, 0, 0]]


def test_micro_batches_hold_every_reply_once_and_keep_to_the_budget():
    lengths = torch.tensor([3, 9, 4, 1, 20, 5, 5])
    groups = micro_batches(lengths, 12)
    assert sorted(int(row) for group in groups for row in group) == list(range(7))
    assert [lengths[group].tolist() for group in groups] == [[20], [9, 3], [5, 5, 1], [4]]


def test_micro_batches_that_are_padded_keep_to_the_budget_with_their_padding():
    lengths = torch.tensor([3, 9, 4, 1, 20, 5, 5])
    groups = micro_batches(lengths, 12, padded=True)
    assert [lengths[group].tolist() for group in groups] == [[20], [9], [5, 5], [4, 3, 1]]


def test_sequences_of_one_unit_stay_together():
    lengths, units = torch.tensor([3, 9, 4, 1, 20, 5]), torch.tensor([0, 1, 0, 2, 1, 2])
    for parts in (micro_batches(lengths, 12, units), mini_batches(6, 2, units, torch.Generator().manual_seed(0))):
        assert sorted(int(row) for part in parts for row in part) == list(range(6))
        assert len(parts) > 1
        for unit in range(3):
            assert sum(bool((units[part] == unit).any()) for part in parts) == 1
