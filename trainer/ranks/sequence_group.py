"""The ranks that read one packed row together, each a stretch of its positions (models/ulysses.py)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceGroup:
    """One of the ranks of a group: `place` says which stretch of `size` it reads."""

    def __init__(self, members: Sequence[int], group: "dist.ProcessGroup", device: torch.device) -> None:
        self.place, self.size = members.index(dist.get_rank()), len(members)
        self._group = group
        # What the first exchange makes NCCL allocate is there before there may be no room.
        self.exchange(torch.zeros(self.size, device=device))

    def exchange(self, sent: Tensor) -> Tensor:
        """Send each member its part of the first dimension; what all sent this one, in their order."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def add_up(self, tensor: Tensor) -> Tensor:
        """The tensor, which becomes the sum of all members'."""
        dist.all_reduce(tensor, group=self._group)
        return tensor
