"""The ranks that train together. Each has the whole of the models and of every batch, and a share of the work and of
what only an update needs (shards.py).

Rank 0 leads: it alone knows the ledger, and orders what the others do with it (orders.py). Whatever may fail on one
rank only is done within `agree`, so that all ranks go on, or all raise; one that raises anything else ends, and its
death ends the others.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tuneloop.shared.errors import EnvironmentRefused, NotFinite, RankFailed, TuneloopError
from tuneloop.trainer.ranks.buckets import Buckets
from tuneloop.trainer.ranks.orders import Order, decode, encode
from tuneloop.trainer.ranks.rendezvous import RENDEZVOUS_VARIABLE
from tuneloop.trainer.ranks.sequence_group import SequenceGroup
from tuneloop.trainer.ranks.shards import Shard

#: A rank that hangs ends the others after so long; one that dies does so at once.
_STUCK = timedelta(minutes=30)
#: Orders are waited for as long as there is no batch, or somebody else whom rank 0 alone waits for.
_QUIET = timedelta(days=3650)

#: Gradients are added up in pieces of so many numbers: few enough to have room for, enough to be fast.
_PIECE = 1 << 24


class Ranks:
    """A rank alone: nobody follows it, and what it has is the sum of all."""

    rank, size = 0, 1
    #: Those with whom it shares rows, if it does.
    sequence: SequenceGroup | None = None

    @property
    def share(self) -> tuple[int, int]:
        """Which share of a batch it has, and how many shares there are: as many as ranks, or groups that share rows."""
        together = self.sequence.size if self.sequence is not None else 1
        return self.rank // together, self.size // together

    @property
    def speaks(self) -> bool:
        """Whether it tells the numbers of its share: of those that share rows one does."""
        return self.sequence is None or self.sequence.place == 0

    def lead(self, order: Order) -> None:
        """Tell the others what to do; rank 0 does it itself besides. What the others say is not heard."""

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Make each tensor, in its place, the sum of all ranks'."""

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """By name the sum over those ranks that have it, which is the same to the bit on all of them."""
        return dict(numbers)

    def add_up_shards(self, parts: Sequence[tuple[Shard, Tensor | None]]) -> dict[Shard, Tensor]:
        """Of one's own shards the sums of all ranks' parts, in the place of one's own. Without a part it has zeros."""
        return {shard: part for shard, part in parts if part is not None}

    def spread(self, parts: Sequence[tuple[Shard, Tensor]]) -> None:
        """Make each part what the shard's owner has in it."""

    def bring(self, owner: int, part: Tensor | None, like: Tensor, into: Tensor | None) -> None:
        """Copy the owner's part, which is as long as `like` and of its type, `into` memory of rank 0.

        Others than the owner have no part, and others than rank 0 nothing to copy into.
        """
        assert part is not None
        assert into is not None
        into.copy_(part, non_blocking=True)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Leave the block together: if it raises one of our errors, or finds no memory, on one rank, it does on all."""
        yield

    def decide(self, decide: Callable[[], int]) -> int:
        """What rank 0 decides."""
        return decide()

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in the place of this one of the same shape."""
        return tensor

    def wait_for_rank_0(self) -> None:
        """Wait, for as long as it takes, until rank 0 has come here too."""


ALONE = Ranks()


class JoinedRanks(Ranks):
    """One of several ranks, once torch.distributed has been initialised. `device` is where its gradients are.

    `together` of them, one after the other, share rows.
    """

    def __init__(self, device: torch.device, *, together: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._orders = dist.new_group(backend="gloo", timeout=_QUIET)
        # Kept, like what the first sum makes NCCL allocate: later there may be no room on one rank.
        self._piece = torch.zeros(_PIECE, device=device)
        dist.all_reduce(self._piece[:1])
        self._buckets = Buckets(self.rank, self.size, _PIECE, device)
        if self.size % together:
            raise EnvironmentRefused(
                f"trainer.ulysses_sequence_parallel_size: {together} workers share each row, and there are {self.size}"
            )
        for first in range(0, self.size, together) if together > 1 else ():
            members = range(first, first + together)
            group = dist.new_group(list(members))
            if self.rank in members:
                self.sequence = SequenceGroup(members, group, device)

    @classmethod
    def join(cls, device: torch.device, *, together: int = 1) -> Self:
        """The rank that the environment names, once all are there."""
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{os.environ[RENDEZVOUS_VARIABLE]}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=_STUCK,
        )
        return cls(device, together=together)

    def lead(self, order: Order) -> None:
        """See Ranks."""
        if self.rank == 0:
            self._broadcast(encode(order))

    def follow(self) -> Order:
        """The next order of rank 0. Raises RankFailed if it has ended without one."""
        try:
            return decode(self._broadcast(None))
        except RuntimeError as error:
            raise RankFailed(f"rank 0 has ended: {error}") from None

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """See Ranks."""
        for together in _pieces(tensors, self._piece.device):
            if len(together) == 1:
                dist.all_reduce(together[0])
                continue
            ends = list(accumulate(each.numel() for each in together))
            parts = [self._piece[end - each.numel() : end] for end, each in zip(ends, together, strict=True)]
            for part, each in zip(parts, together, strict=True):
                part.copy_(each.flatten())
            dist.all_reduce(self._piece[: ends[-1]])
            for part, each in zip(parts, together, strict=True):
                each.copy_(part.view_as(each))

    def add_up_shards(self, parts: Sequence[tuple[Shard, Tensor | None]]) -> dict[Shard, Tensor]:
        """See Ranks."""
        with self.agree():
            sums = {
                shard: torch.zeros(shard.length, device=self._piece.device) if part is None else part
                for shard, part in parts
                if shard.owner == self.rank
            }
        self._buckets.add_up(parts, sums)
        return sums

    def spread(self, parts: Sequence[tuple[Shard, Tensor]]) -> None:
        """See Ranks."""
        for dtype in {part.dtype: None for _, part in parts}:
            self._buckets.spread([(shard, part) for shard, part in parts if part.dtype == dtype])

    def bring(self, owner: int, part: Tensor | None, like: Tensor, into: Tensor | None) -> None:
        """See Ranks. All hear it, piece by piece: to send to one would take memory of NCCL's that may not be there."""
        if owner == 0:
            return super().bring(owner, part, like, into) if self.rank == 0 else None
        room = self._piece.view(like.dtype)
        for start in range(0, len(like), len(room)):
            span = slice(start, min(len(like), start + len(room)))
            received = room[: span.stop - start]
            if part is not None:
                received.copy_(part[span])
            dist.broadcast(received, src=owner)
            if into is not None:
                into[span].copy_(received, non_blocking=True)

    def add_up_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """See Ranks."""
        sums: defaultdict[str, float] = defaultdict(float)
        for encoded in self._gather(msgspec.msgpack.encode(numbers)):
            for name, value in msgspec.msgpack.decode(encoded, type=dict[str, float]).items():
                sums[name] += value
        return dict(sums)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """See Ranks."""
        failed: Exception | None = None
        try:
            yield
        except (torch.OutOfMemoryError, TuneloopError) as error:
            if self.sequence is not None and isinstance(error, torch.OutOfMemoryError):
                # Those that share the row wait for what this one does not send: there is nobody to agree with.
                raise EnvironmentRefused(_TOO_LONG.format(error)) from None
            failed = error
        failures = [
            msgspec.msgpack.decode(each, type=tuple[int, str])
            for each in self._gather(msgspec.msgpack.encode((_kind(failed), str(failed or ""))))
        ]
        worst, reason = max(failures, key=lambda each: each[0])
        if worst == _NO_FAILURE:
            return
        if failed is not None and _kind(failed) == worst:
            raise failed
        raise _KINDS[worst](f"on another rank: {reason}")

    def decide(self, decide: Callable[[], int]) -> int:
        """See Ranks."""
        number = torch.tensor([decide() if self.rank == 0 else 0])
        dist.broadcast(number, src=0)
        return int(number)

    def from_rank_0(self, tensor: Tensor) -> Tensor:
        """See Ranks."""
        dist.broadcast(tensor, src=0)
        return tensor

    def wait_for_rank_0(self) -> None:
        """See Ranks."""
        dist.broadcast(torch.zeros(1), src=0, group=self._orders)

    def leave(self) -> None:
        """End what `join` began, without an error of any rank."""
        dist.destroy_process_group()

    def _broadcast(self, sent: bytes | None) -> bytes:
        length = torch.tensor([len(sent or b"")])
        dist.broadcast(length, src=0, group=self._orders)
        data = torch.empty(int(length), dtype=torch.uint8) if sent is None else _tensor(sent)
        dist.broadcast(data, src=0, group=self._orders)
        return data.numpy().tobytes()

    def _gather(self, own: bytes) -> list[bytes]:
        """What each rank says, in their order."""
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(each) for each in lengths)
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, _tensor(own.ljust(longest, b"\0")))
        return [each.numpy().tobytes()[: int(length)] for each, length in zip(gathered, lengths, strict=True)]


_TOO_LONG = (
    "trainer.micro_batch_tokens: memory ran out within a row that several workers share, where it cannot be cut smaller"
    " ({}). Lower it, or raise trainer.ulysses_sequence_parallel_size"
)

#: Of what ranks may raise together, the worst is raised where they fail differently.
_NO_FAILURE = 0
_KINDS: Mapping[int, type[Exception]] = {1: torch.OutOfMemoryError, 2: NotFinite, 3: RankFailed}


def _kind(failed: Exception | None) -> int:
    if failed is None:
        return _NO_FAILURE
    return next((number for number, kind in _KINDS.items() if isinstance(failed, kind)), 3)


def _pieces(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Sequence[Tensor]]:
    """The tensors in order, small ones that are on the device together."""
    together: list[Tensor] = []
    for each in tensors:
        if each.device != device or each.numel() > _PIECE or each.dtype != torch.float32:
            yield [each]
            continue
        if sum(one.numel() for one in together) + each.numel() > _PIECE:
            yield together
            together = []
        together.append(each)
    if together:
        yield together


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
