"""The task: sums of two digits, and a judge that gives 1 for the right answer and 0 for any other."""

import random
from collections.abc import Iterator
from typing import NamedTuple


class Sum(NamedTuple):
    """A question and what its answer must be."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """What the agent asks."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The only right reply."""
        return str(self.left + self.right)


ALL = tuple(Sum(left, right) for left in range(10) for right in range(10))


def judge(asked: Sum, reply: str | None) -> float:
    """The reward of a reply."""
    return float((reply or "").strip() == asked.answer)


def forever(seed: int) -> Iterator[Sum]:
    """Sums without end, each of the hundred once in every hundred."""
    order = random.Random(seed)
    while True:
        yield from order.sample(ALL, len(ALL))
