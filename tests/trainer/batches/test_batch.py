"""Samples as tensors."""

import numpy as np
import pytest
import torch

from tests.trainer.factories import sample
from tuneloop.trainer.batches.batch import collate, micro_batches
from tuneloop.trainer.batches.sequences import TokenSequence


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


def test_micro_batches_hold_every_reply_once_and_keep_to_the_budget():
    lengths = torch.tensor([3, 9, 4, 1, 20, 5, 5])
    groups = micro_batches(lengths, 12)
    assert sorted(int(row) for group in groups for row in group) == list(range(7))
    assert [lengths[group].tolist() for group in groups] == [[20], [9, 3], [5, 5, 1], [4]]
