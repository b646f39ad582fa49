"""Production calls: what marks them, which of them are run again, and what is recorded while they run."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class RecordedToolCall:
    """A tool's call by name and arguments (JSON), and what came of it."""

    name: str
    arguments: str
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class CallTrace:
    """A production call under way: its tool calls, if they are `recorded`, and what was marked while it ran."""

    recorded: bool
    tool_calls: list[RecordedToolCall] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    ended: bool = False


#: A production call, or the replay of a shadow run: within one, nothing is a production call of its own.
_current: ContextVar[object] = ContextVar("tuneloop_call", default=None)
_of_next: ContextVar[list[str] | None] = ContextVar("tuneloop_marks_of_next_call", default=None)
_of_block: ContextVar[tuple[str, ...]] = ContextVar("tuneloop_marks_of_block", default=())


class _Marking:
    """Marks that were set: with a `with` they hold for its block, else for the next call, where `new` were added."""

    def __init__(self, labels: tuple[str, ...], new: list[str], waiting: list[str]) -> None:
        self._labels, self._new, self._waiting = labels, new, waiting
        self._token: Token[tuple[str, ...]] | None = None

    def __enter__(self) -> None:
        for label in self._new:
            if label in self._waiting:
                self._waiting.remove(label)
        self._token = _of_block.set((*_of_block.get(), *self._labels))

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _of_block.reset(self._token)


class TrainingContext:
    """Marks calls as worth a shadow run, in this thread or asyncio task and those that copy its context."""

    @staticmethod
    def mark(*labels: str) -> _Marking:
        """Mark the next call, this one within a call, or all of a block: `with TrainingContext.mark("hard"): …`."""
        if not labels or not all(isinstance(each, str) and each for each in labels):
            raise ValueError("mark: give at least one label, each a text")
        if (trace := current_trace()) is not None:
            new = [each for each in labels if each not in trace.marks]
            trace.marks.extend(new)
            return _Marking(labels, new, trace.marks)
        # A list of its own: a context that was copied before must not see it. Those copied from now on share it, so
        # that one of their calls is the next one.
        earlier = _take_marks_of_next()
        new = [each for each in labels if each not in earlier]
        waiting = [*earlier, *new]
        _of_next.set(waiting)
        return _Marking(labels, new, waiting)

    @staticmethod
    def marks() -> tuple[str, ...]:
        """The labels that the next call would have."""
        return (*_of_block.get(), *(_of_next.get() or ()))


def current() -> object:
    """The CallTrace, or the replay of a shadow run, that runs in this context."""
    return _current.get()


def current_trace() -> CallTrace | None:
    """The production call that runs in this context, if one does."""
    found = _current.get()
    return found if isinstance(found, CallTrace) and not found.ended else None


@contextmanager
def in_context(what: object) -> Iterator[None]:
    """Make something the current one, in this context."""
    token = _current.set(what)
    try:
        yield
    finally:
        _current.reset(token)


def take_marks() -> tuple[str, ...]:
    """The labels of the call that begins now: those of the blocks around, and those that were meant for it alone."""
    return (*_of_block.get(), *_take_marks_of_next())


def _take_marks_of_next() -> tuple[str, ...]:
    waiting = _of_next.get()
    if not waiting:
        return ()
    found = tuple(waiting)
    waiting.clear()
    return found


def copy_or_same(thing: T) -> T:
    """A copy that nothing else changes; the thing itself where it cannot be copied."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # noqa: BLE001 - any class may refuse to be copied in its own way
        return thing
