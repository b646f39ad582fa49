"""Moves tensors from a GPU to main memory: gradients for an optimizer there, or a whole learner."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class OffloadedGradients:
    """Copies of gradients in main memory, pinned if from a GPU, and overwritten at the next update."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    @contextmanager
    def take(self, gradients: dict[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the copies, for an update in the block; the originals are released."""
        copies = {}
        for name, gradient in gradients.items():
            if name not in self._held:
                self._held[name] = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            copies[name] = self._held[name].copy_(gradient, non_blocking=True)
        for device in {each.device for each in gradients.values() if each.is_cuda}:
            torch.cuda.synchronize(device)
        gradients.clear()
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        # This process's share of the cores: beside a GPU torch otherwise has one thread (model.device_of).
        torch.set_num_threads(max(threads, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        try:
            yield copies
        finally:
            torch.set_num_threads(threads)


class _Place(NamedTuple):
    """A tensor's view of possibly shared memory; `offset` counts elements."""

    tensor: Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class MovedTensors:
    """Tensors moved off a device, with all that share their memory, until they are put back.

    They can be read and saved from main memory. Tensors stay the same objects, so that optimizers, hooks and compiled
    code remain valid.
    """

    def __init__(self, tensors: Iterable[Tensor], room: Callable[[Tensor], Tensor]) -> None:
        """`room` allocates memory like a tensor of bytes. Afterwards the device has no copy."""
        storages: dict[int, tuple[Tensor, list[_Place]]] = {}
        for each in {id(each): each for each in tensors}.values():
            storage = each.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=each.device).set_(storage)
            place = _Place(each, int(each.storage_offset()), each.size(), each.stride())
            storages.setdefault(storage.data_ptr(), (whole, []))[1].append(place)
        self._moved: list[tuple[Tensor, torch.device, list[_Place]]] = []
        for whole, shared in storages.values():
            copy = room(whole).copy_(whole, non_blocking=True)
            self._moved.append((copy, whole.device, shared))
        for device in {device for _, device, _ in self._moved if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        storages.clear()
        for copy, _, shared in self._moved:
            _share(copy, shared)

    def put_back(self) -> None:
        """Move the tensors back. Raises torch.OutOfMemoryError, and then moves none."""
        copies = [copy.to(device, non_blocking=True, copy=True) for copy, device, _ in self._moved]
        for copy, (_, _, shared) in zip(copies, self._moved, strict=True):
            _share(copy, shared)
        self._moved.clear()


def _share(memory: Tensor, places: Iterable[_Place]) -> None:
    """Point the tensors to new memory with the same layout."""
    for each in places:
        dtype = each.tensor.dtype
        offset = memory.storage_offset() // dtype.itemsize + each.offset
        moved = torch.empty(0, dtype=dtype, device=memory.device)
        each.tensor.data = moved.set_(memory.untyped_storage(), offset, each.size, each.stride)
