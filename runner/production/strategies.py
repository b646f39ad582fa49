"""Which production calls are run again as shadow runs."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionCall:
    """A call of the production agent: what it was asked, how it was marked, and what it answered, once it has."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    result: Any = None


class SelectionStrategy(Protocol):
    """Says whether a call is run again.

    It is asked before the call, in the app's thread: it should be quick. One that has `after_call = True` is asked when
    the call has been answered, in a thread of the runner's, and sees the result; the inputs of every call are copied.
    """

    def should_select(self, call: ProductionCall) -> bool:
        """Whether this call is run again."""


#: A strategy, or a function that is its `should_select`.
Strategy = SelectionStrategy | Callable[[ProductionCall], bool]


@dataclass(frozen=True, slots=True)
class SamplingRateStrategy:
    """A share of the calls, drawn by chance."""

    rate: float
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate: {self.rate} is no share from 0 to 1")

    @classmethod
    def of(cls, rate: float) -> "SamplingRateStrategy":
        """So large a share, from 0 to 1."""
        return cls(rate)

    def should_select(self, call: ProductionCall) -> bool:
        """Whether the draw says so."""
        return self.draw() < self.rate


@dataclass(frozen=True, slots=True)
class ExplicitMarkingStrategy:
    """The calls that the app marked; with `labels`, those that have one of them."""

    labels: frozenset[str] = frozenset()
    after_call: bool = False

    @classmethod
    def create(cls, *labels: str, during_call: bool = False) -> "ExplicitMarkingStrategy":
        """`during_call`: what is marked while the call runs counts too."""
        return cls(frozenset(labels), during_call)

    def should_select(self, call: ProductionCall) -> bool:
        """Whether it is marked."""
        return bool(self.labels.intersection(call.marks) if self.labels else call.marks)


@dataclass(frozen=True, slots=True)
class EveryCall:
    """All of them."""

    after_call: ClassVar[bool] = False

    def should_select(self, call: ProductionCall) -> bool:
        """Always."""
        return True
