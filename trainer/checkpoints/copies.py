"""Copies of what a learner is, made between two steps and written while the next ones are made."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tuneloop.shared.settings.hardware import free_memory
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.pinned_memory import PinnedMemory
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.optimizer import Room

T = TypeVar("T")

#: Memory that stays free beside a copy, as a part of it.
_SLACK = 0.25


class Copies(Generic[T]):
    """Copies in main memory, one at a time. Those of a GPU's tensors are pinned, and written over by the next.

    `size_of` says how many bytes one takes, `copy` makes it in memory that it is given.
    """

    def __init__(self, size_of: Callable[[Learner], int], copy: Callable[[Learner, Room], T]) -> None:
        self._size_of, self._copy = size_of, copy
        self._memory = PinnedMemory()
        self._buffers: dict[str, Tensor] = {}
        self._prepared: Future[None] | None = None

    def prepare(self, learner: Learner, pool: Executor) -> None:
        """Begin to make room, in the pool, if the learner is on a GPU: else the first copy would wait for it."""
        if self._prepared is None:
            self._prepared = pool.submit(self._reserve, learner)

    def _reserve(self, learner: Learner) -> None:
        device, size = learner.actor.network.device, self._size_of(learner)
        if device.type != "cuda" or not _has_memory_for(size):
            return
        largest = max(each.numel() for each in learner.actor.network.parameters())
        with torch.cuda.device(device):
            self._memory.reserve(size, largest=4 * largest)

    def of(self, learner: Learner) -> T | None:
        """A copy that is complete; None if there is no room for one."""
        if self._prepared is not None:
            self._prepared.result()
        size = self._size_of(learner)
        if not self._buffers and not self._memory.holds(size) and not _has_memory_for(size):
            return None
        device = learner.actor.network.device
        on_gpu = device.type == "cuda"
        copied = self._copy(learner, self._pin if on_gpu else snapshot.allocate_on_cpu)
        if on_gpu:
            torch.cuda.synchronize(device)
        return copied

    def _pin(self, place: str, like: Tensor) -> Tensor:
        held = self._buffers.get(place)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            held = self._buffers[place] = self._memory.take(like)
        return held


def _has_memory_for(size: int) -> bool:
    return free_memory() >= size * (1 + _SLACK)
