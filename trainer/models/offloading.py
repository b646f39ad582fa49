"""What is in main memory instead of a GPU's: gradients on their way to an optimizer there, whose update the CPU's cores
make together; and a whole learner, while another process has the GPU.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class OffloadedGradients:
    """Copies in main memory, pinned where they come from a GPU, and written over by those of the next update."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    @contextmanager
    def take(self, gradients: dict[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """The copies, for an update that is made within; the originals are let go of."""
        copies = {}
        for name, gradient in gradients.items():
            if name not in self._held:
                self._held[name] = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            copies[name] = self._held[name].copy_(gradient, non_blocking=True)
        for device in {each.device for each in gradients.values() if each.is_cuda}:
            torch.cuda.synchronize(device)
        gradients.clear()
        with _all_cores():
            yield copies


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let torch use this process's share of the cores; otherwise beside a GPU it has one thread (model.device_of)."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Place(NamedTuple):
    """Where a tensor lies in memory that it may share; `offset` counts its own numbers."""

    tensor: Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class MovedTensors:
    """Tensors that have left a device, with all that shares memory with them, until they are put back.

    They are read and saved as before, from main memory. A tensor is the same object all the while, so that optimizers,
    hooks and compiled code go on with it.
    """

    def __init__(self, tensors: Iterable[Tensor], room: Callable[[Tensor], Tensor]) -> None:
        """`room` makes memory like that of a tensor of bytes; nothing of it is on the device any more afterwards."""
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
        """Have them on their device again. Raises torch.OutOfMemoryError, and then none is there."""
        copies = [copy.to(device, non_blocking=True, copy=True) for copy, device, _ in self._moved]
        for copy, (_, _, shared) in zip(copies, self._moved, strict=True):
            _share(copy, shared)
        self._moved.clear()


def _share(memory: Tensor, places: Iterable[_Place]) -> None:
    """Have the tensors lie in other bytes as they lay in those that they came from."""
    for each in places:
        dtype = each.tensor.dtype
        offset = memory.storage_offset() // dtype.itemsize + each.offset
        moved = torch.empty(0, dtype=dtype, device=memory.device)
        each.tensor.data = moved.set_(memory.untyped_storage(), offset, each.size, each.stride)
