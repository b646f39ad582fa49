"""Copies a learner between two steps, asynchronously on a GPU, where only the next update waits for the end."""

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

_CHUNK = 1 << 30  # size of an allocation, unless a tensor is larger; torch rounds up to a power of two
_ALIGNMENT = 64  # alignment of tensors in bytes, enough for each dtype


class _Chunk(NamedTuple):
    memory: Tensor
    used: int


class PinnedMemory:
    """Allocates tensors in few large blocks of pinned memory, which are never freed."""

    def __init__(self, allocate: Callable[[int], Tensor] | None = None, *, chunk: int = _CHUNK) -> None:
        self._allocate = allocate or _allocate_pinned
        self._chunk = chunk
        self._chunks: list[_Chunk] = []

    def reserve(self, size: int, *, largest: int) -> None:
        """Allocate room for tensors of `size` bytes in all, the largest of `largest`."""
        self._chunk = max(self._chunk, 1 << (_align(largest) - 1).bit_length())
        while not self.holds(size):
            self._chunks.append(_Chunk(self._allocate(self._chunk), 0))

    def holds(self, size: int) -> bool:
        return sum(len(each.memory) - each.used for each in self._chunks) >= size

    def take(self, like: Tensor) -> Tensor:
        """A tensor like another, in reserved or new memory."""
        size = like.numel() * like.itemsize
        fitting = (number for number, each in enumerate(self._chunks) if len(each.memory) - each.used >= size)
        if (number := next(fitting, None)) is None:
            number = len(self._chunks)
            self._chunks.append(_Chunk(self._allocate(max(self._chunk, _align(size))), 0))
        memory, used = self._chunks[number]
        self._chunks[number] = _Chunk(memory, min(len(memory), used + _align(size)))
        return memory[used : used + size].view(like.dtype).view(like.shape)


class PinnedBuffers:
    """Pinned memory that is reused each time tensors leave a GPU."""

    def __init__(self, *, chunk: int = _CHUNK) -> None:
        self._memory = PinnedMemory(chunk=chunk)
        self._rooms: defaultdict[int, list[Tensor]] = defaultdict(list)  # tensors of the memory by size

    def empty(self) -> Callable[[Tensor], Tensor]:
        """An allocator for one move: reuses earlier tensors, and adds more if necessary."""
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
    except RuntimeError as error:  # such as a limit on locked memory; copies are slower then
        _log.warning("memory_not_pinned", bytes=size, reason=str(error).splitlines()[0])
        return torch.empty(size, dtype=torch.uint8)


T = TypeVar("T")

_SLACK = 0.25  # share of a copy's size that must stay free beside it


class MemoryCopies(Generic[T]):
    """Copies in main memory, one at a time, made by `copy` in `size_of` bytes; a GPU's are pinned and reused."""

    def __init__(self, size_of: Callable[[Learner], int], copy: Callable[[Learner, Room], T]) -> None:
        self._size_of, self._copy = size_of, copy
        self._memory = PinnedMemory()
        #: By name, shape and dtype: learners may have adapters of different ranks.
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._prepared: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, learner: Learner, pool: Executor) -> None:
        """Reserve memory in the pool, if the learner is on a GPU, so that the first copy does not wait."""
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
        """A copy, complete after `wait`; None without memory."""
        if self._prepared is not None:
            self._prepared.result()
        size = self._size_of(learner)
        if not self._buffers and not self._memory.holds(size) and not _has_memory_for(size):
            return None
        device = learner.actor.network.device
        if device.type != "cuda":
            return self._copy(learner, snapshot.allocate_on_cpu)
        now = torch.cuda.current_stream(device)
        aside = now  # communication between ranks has its own order
        if learner.ranks.size == 1:
            self._stream = aside = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            aside.wait_stream(now)
        with torch.cuda.stream(aside):
            copied = self._copy(learner, self._pin)
        self._copied = aside.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        learner.copying.append(self._copied)
        return copied

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _pin(self, place: str, like: Tensor) -> Tensor:
        place_of = (place, like.shape, like.dtype)
        if place_of not in self._buffers:
            self._buffers[place_of] = self._memory.take(like)
        return self._buffers[place_of]


def _has_memory_for(size: int) -> bool:
    return free_memory() >= size * (1 + _SLACK)
