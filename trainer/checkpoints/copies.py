"""Copies of what a learner is between two steps, made and written while the next ones are made.

A GPU copies beside its other work: only the next update, which would change what is copied, waits for the end.
"""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, NamedTuple, TypeVar

import structlog
import torch
from torch import Tensor

from tuneloop.shared.settings.hardware import free_memory
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.models.optimizer import Room

_log = structlog.get_logger()

#: What is got at once, unless a tensor needs more. torch rounds up to a power of two, so that others would be wasted.
_CHUNK = 1 << 30

#: Of the beginning of a tensor, in bytes: more than any type needs.
_ALIGNMENT = 64


class _Chunk(NamedTuple):
    memory: Tensor
    used: int


class PinnedMemory:
    """Tensors in few large pieces of pinned memory, which are never given back."""

    def __init__(self, allocate: Callable[[int], Tensor] | None = None, *, chunk: int = _CHUNK) -> None:
        self._allocate = allocate or _allocate_pinned
        self._chunk = chunk
        self._chunks: list[_Chunk] = []

    def reserve(self, size: int, *, largest: int) -> None:
        """Get room for tensors of `size` bytes in all, of which the largest has so many."""
        self._chunk = max(self._chunk, 1 << (_align(largest) - 1).bit_length())
        while not self.holds(size):
            self._chunks.append(_Chunk(self._allocate(self._chunk), 0))

    def holds(self, size: int) -> bool:
        """Whether so many bytes were reserved and are not taken."""
        return sum(len(each.memory) - each.used for each in self._chunks) >= size

    def take(self, like: Tensor) -> Tensor:
        """A tensor like another, of what was reserved, or of what has to be got now."""
        size = like.numel() * like.itemsize
        fitting = (number for number, each in enumerate(self._chunks) if len(each.memory) - each.used >= size)
        if (number := next(fitting, None)) is None:
            number = len(self._chunks)
            self._chunks.append(_Chunk(self._allocate(max(self._chunk, _align(size))), 0))
        memory, used = self._chunks[number]
        self._chunks[number] = _Chunk(memory, min(len(memory), used + _align(size)))
        return memory[used : used + size].view(like.dtype).view(like.shape)


class PinnedBuffers:
    """Pinned memory that is used again each time that tensors leave a GPU."""

    def __init__(self, *, chunk: int = _CHUNK) -> None:
        self._memory = PinnedMemory(chunk=chunk)
        #: What was taken of it, by its size.
        self._rooms: defaultdict[int, list[Tensor]] = defaultdict(list)

    def empty(self) -> Callable[[Tensor], Tensor]:
        """Room for one leaving: what earlier ones had, and more where it is too little."""
        left = {size: iter(tuple(held)) for size, held in self._rooms.items()}

        def room(whole: Tensor) -> Tensor:
            found = next(left.get(len(whole), iter(())), None)
            if found is None:
                found = self._memory.take(whole)
                self._rooms[len(whole)].append(found)
            return found

        return room


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate_pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # A limit on locked memory, say. Copies take longer then.
        _log.warning("memory_not_pinned", bytes=size, reason=str(error).splitlines()[0])
        return torch.empty(size, dtype=torch.uint8)


T = TypeVar("T")

#: Memory that stays free beside a copy, as a part of it.
_SLACK = 0.25


class MemoryCopies(Generic[T]):
    """Copies in main memory, one at a time. Those of a GPU's tensors are pinned, and written over by the next.

    `size_of` says how many bytes one takes, `copy` makes it in memory that it is given.
    """

    def __init__(self, size_of: Callable[[Learner], int], copy: Callable[[Learner, Room], T]) -> None:
        self._size_of, self._copy = size_of, copy
        self._memory = PinnedMemory()
        #: By name and shape: learners may have adapters of different ranks.
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._prepared: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

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
        """A copy, which is complete after `wait`; None if there is no room for one."""
        if self._prepared is not None:
            self._prepared.result()
        size = self._size_of(learner)
        if not self._buffers and not self._memory.holds(size) and not _has_memory_for(size):
            return None
        device = learner.actor.network.device
        if device.type != "cuda":
            return self._copy(learner, snapshot.allocate_on_cpu)
        now = torch.cuda.current_stream(device)
        aside = now  # What several ranks send one another has its own order.
        if learner.ranks.size == 1:
            self._stream = aside = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            aside.wait_stream(now)
        with torch.cuda.stream(aside):
            copied = self._copy(learner, self._pin)
        self._copied = aside.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        learner.copying.append(self._copied)
        return copied

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _pin(self, place: str, like: Tensor) -> Tensor:
        place_of = (place, like.shape, like.dtype)
        if place_of not in self._buffers:
            self._buffers[place_of] = self._memory.take(like)
        return self._buffers[place_of]


def _has_memory_for(size: int) -> bool:
    return free_memory() >= size * (1 + _SLACK)
