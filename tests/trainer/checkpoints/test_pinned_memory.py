"""Copies lie in few large pieces of memory, which are there before they are needed."""

import pytest
import torch

from tuneloop.trainer.checkpoints.copies import PinnedMemory

pytestmark = pytest.mark.contract


def test_tensors_of_any_type_lie_apart_in_what_was_reserved():
    made = []

    def allocate(size):
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    memory = PinnedMemory(allocate, chunk=1024)
    memory.reserve(3000, largest=700)
    assert made == [1024] * 3
    assert memory.holds(3000)
    likes = [torch.rand(175), torch.rand(75).bfloat16(), torch.arange(33), torch.rand(3, 5, 7), torch.tensor(7)]
    copies = [memory.take(each).copy_(each) for each in likes]
    assert made == [1024] * 3
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(copies, likes, strict=True))
    large = torch.rand(600)
    assert torch.equal(memory.take(large).copy_(large), large), "nobody reserved it"
    assert made == [1024, 1024, 1024, 2432]
    assert all(torch.equal(one, other) for one, other in zip(copies, likes, strict=True))


def test_a_piece_is_as_large_as_the_largest_tensor():
    made = []
    memory = PinnedMemory(lambda size: made.append(size) or torch.zeros(size, dtype=torch.uint8), chunk=64)
    memory.reserve(5000, largest=1500)
    assert made == [2048] * 3
