"""Gradients on their way to an optimizer in main memory, whose update the CPU's cores make together."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from tuneloop.trainer.ranks.shards import Shard


class OffloadedGradients:
    """Copies in main memory, pinned where they come from a GPU, and written over by those of the next update."""

    def __init__(self) -> None:
        self._held: dict[Shard, Tensor] = {}

    @contextmanager
    def take(self, gradients: dict[Shard, Tensor]) -> Iterator[Mapping[Shard, Tensor]]:
        """The copies, for an update that is made within; the originals are let go of."""
        copies = {}
        for shard, gradient in gradients.items():
            if shard not in self._held:
                self._held[shard] = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
            copies[shard] = self._held[shard].copy_(gradient, non_blocking=True)
        if any(each.is_cuda for each in gradients.values()):
            torch.cuda.synchronize()
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
