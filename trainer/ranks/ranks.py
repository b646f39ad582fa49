"""The ranks that train together. Each has the whole of the models and of every batch, and a share of the work and of
what only an update needs.

Rank 0 leads: it alone knows the ledger, and orders what the others do with it (orders.py). Whatever may fail on one
rank only is done within `agree`, so that all ranks go on, or all raise; one that raises anything else ends, and its
death ends the others.

Which numbers of which parameter a rank updates: of all together a stretch, about as long as any other's.

Shards of all ranks in buckets: of each owner as many numbers, so that one collective call moves those of all.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tuneloop.shared.errors import EnvironmentRefused, NotFinite, RankFailed, TuneloopError
from tuneloop.trainer.ranks.orders import Order, decode, encode
from tuneloop.trainer.ranks.rendezvous import RENDEZVOUS_VARIABLE
from tuneloop.trainer.ranks.sequence_group import SequenceGroup

#: Stretches begin at multiples of this in a parameter, where the blocks of 8-bit moments begin (models/eight_bit.py).
BLOCK = 256


class Shard(NamedTuple):
    """The numbers from `start` to `stop` of a parameter, row after row, which are rank `owner`'s."""

    name: str
    owner: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Where they are in the parameter."""
        return slice(self.start, self.stop)

    @property
    def blocks(self) -> slice:
        """Which blocks of the parameter they are in."""
        return slice(self.start // BLOCK, -(-self.stop // BLOCK))


def cut(counts: Mapping[str, int], ranks: int) -> list[Shard]:
    """The shards of parameters of so many numbers, in the order of parameters, then owners."""
    bounds = [sum(counts.values()) * rank // ranks for rank in range(1, ranks)]
    shards, before = [], 0
    for name, count in counts.items():
        start = 0
        for owner in range(ranks):
            stop = count if owner == ranks - 1 else min(count, -(-(bounds[owner] - before) // BLOCK) * BLOCK)
            if stop > start:
                shards.append(Shard(name, owner, start, stop))
                start = stop
        before += count
    return shards


#: Other names in torch 2.10 to 2.12.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_Part = TypeVar("_Part", Tensor, Tensor | None)


class _Stretch(NamedTuple, Generic[_Part]):
    """The numbers `span` of a shard, which begin at `start` among its owner's in a bucket."""

    shard: Shard
    part: _Part
    span: slice
    start: int

    @property
    def length(self) -> int:
        return int(self.span.stop - self.span.start)

    @property
    def place(self) -> slice:
        """Where they are among the owner's."""
        return slice(self.start, self.start + self.length)


class Buckets:
    """Moves shards between ranks, of which this one is `rank`, through memory that is kept: later there may be none.

    While one bucket is on its way the next one is filled.
    """

    def __init__(self, rank: int, size: int, numbers: int, device: torch.device) -> None:
        """`numbers`: float32 numbers of all owners that are on their way at any time."""
        self._rank, self._size = rank, size
        width = numbers // (2 * size)
        self._wholes = [torch.zeros(size * width, device=device) for _ in range(2)]
        self._owns = [torch.zeros(width, device=device) for _ in range(2)]
        # So is what the first call of each kind makes NCCL allocate.
        _reduce_scatter(self._owns[0][:1], self._wholes[0][:size])
        _all_gather(self._wholes[0][:size], self._owns[0][:1])

    def add_up(self, parts: Sequence[tuple[Shard, Tensor | None]], sums: dict[Shard, Tensor]) -> None:
        """Make the sums, of this rank's shards, those of all ranks' parts. A part that is None is zeros."""

        def send(number: int, owners: list[list[_Stretch[Tensor | None]]], width: int) -> Any:
            whole, own = self._wholes[number % 2][: self._size * width], self._owns[number % 2][:width]
            for owner, stretches in enumerate(owners):
                room = whole[owner * width :][:width]
                for each in stretches:
                    if each.part is None:
                        room[each.place].zero_()
                    else:
                        room[each.place].copy_(each.part[each.span])
            return _reduce_scatter(own, whole, async_op=True)

        def receive(number: int, owners: list[list[_Stretch[Tensor | None]]], width: int) -> None:
            for each in owners[self._rank]:
                sums[each.shard][each.span] = self._owns[number % 2][each.place]

        _pipeline(_cut(parts, self._size, len(self._owns[0])), send, receive)

    def spread(self, parts: Sequence[tuple[Shard, Tensor]]) -> None:
        """Make each part, all of one type, what the shard's owner has in it."""
        if not parts:
            return
        dtype = parts[0][1].dtype
        wholes, owns = ([each.view(dtype) for each in some] for some in (self._wholes, self._owns))

        def send(number: int, owners: list[list[_Stretch[Tensor]]], width: int) -> Any:
            own = owns[number % 2][:width]
            for each in owners[self._rank]:
                own[each.place].copy_(each.part[each.span])
            return _all_gather(wholes[number % 2][: self._size * width], own, async_op=True)

        def receive(number: int, owners: list[list[_Stretch[Tensor]]], width: int) -> None:
            for owner, stretches in enumerate(owners):
                room = wholes[number % 2][owner * width :][:width]
                for each in stretches if owner != self._rank else ():
                    each.part[each.span] = room[each.place]

        _pipeline(_cut(parts, self._size, len(owns[0])), send, receive)


def _pipeline(
    buckets: Iterable[list[list[_Stretch[_Part]]]],
    send: Callable[[int, list[list[_Stretch[_Part]]], int], Any],
    receive: Callable[[int, list[list[_Stretch[_Part]]], int], None],
) -> None:
    """Send each bucket before the one before it is received; with its number, and the numbers of its fullest owner."""
    under_way: tuple[Any, int, list[list[_Stretch[_Part]]], int] | None = None

    def end() -> None:
        if under_way is not None:
            work, *bucket = under_way
            work.wait()
            receive(*bucket)  # type: ignore[arg-type]

    for number, owners in enumerate(buckets):
        width = max(stretches[-1].place.stop for stretches in owners if stretches)
        work = send(number, owners, width)
        end()
        under_way = work, number, owners, width
    end()


def _cut(parts: Sequence[tuple[Shard, _Part]], size: int, most: int) -> Iterator[list[list[_Stretch[_Part]]]]:
    """Bucket after bucket, of each owner what is next: at most so many numbers."""
    streams = [_stretches([each for each in parts if each[0].owner == owner], most) for owner in range(size)]
    while any(owners := [next(stream, []) for stream in streams]):
        yield owners


def _stretches(parts: Sequence[tuple[Shard, _Part]], most: int) -> Iterator[list[_Stretch[_Part]]]:
    """An owner's numbers, so many at a time."""
    together: list[_Stretch[_Part]] = []
    filled = 0
    for shard, part in parts:
        start = 0
        while start < shard.length:
            span = slice(start, min(shard.length, start + most - filled))
            together.append(_Stretch(shard, part, span, filled))
            filled, start = together[-1].place.stop, span.stop
            if filled == most:
                yield together
                together, filled = [], 0
    if together:
        yield together


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
