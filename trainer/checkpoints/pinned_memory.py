"""Main memory that a GPU copies into at full speed. To get it takes a second for each gigabyte, so it is got ahead."""

from collections.abc import Callable
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

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
        """`allocate` makes so many bytes."""
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


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate_pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # A limit on locked memory, say. Copies take longer then.
        _log.warning("memory_not_pinned", bytes=size, reason=str(error).splitlines()[0])
        return torch.empty(size, dtype=torch.uint8)
