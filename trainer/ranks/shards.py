"""Which numbers of which parameter a rank updates: of all together a stretch, about as long as any other's."""

from collections.abc import Mapping
from typing import NamedTuple

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
