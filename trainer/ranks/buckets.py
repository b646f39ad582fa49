"""Shards of all ranks in buckets: of each owner as many numbers, so that one collective call moves those of all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tuneloop.trainer.ranks.shards import Shard

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
