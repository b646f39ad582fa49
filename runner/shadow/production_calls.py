"""Marks, selects and traces production calls for shadow runs."""

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
    """A call of the production agent: inputs, marks, and the answer once it exists."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    result: Any = None


class SelectionStrategy(Protocol):
    """Decides whether a call is repeated.

    It runs before the call in the app's thread, so it should be quick. With `after_call = True` it runs after the
    answer in a thread of the runner, sees the result, and the inputs of every call are copied.
    """

    def should_select(self, call: ProductionCall) -> bool: ...


Strategy = SelectionStrategy | Callable[[ProductionCall], bool]  # a strategy, or a function like `should_select`


@dataclass(frozen=True, slots=True)
class SamplingRateStrategy:
    rate: float
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate: {self.rate} is no share from 0 to 1")

    @classmethod
    def of(cls, rate: float) -> "SamplingRateStrategy":
        return cls(rate)

    def should_select(self, call: ProductionCall) -> bool:
        return self.draw() < self.rate


@dataclass(frozen=True, slots=True)
class ExplicitMarkingStrategy:
    """Selects marked calls; with `labels`, those with one of them."""

    labels: frozenset[str] = frozenset()
    after_call: bool = False

    @classmethod
    def create(cls, *labels: str, during_call: bool = False) -> "ExplicitMarkingStrategy":
        """`during_call`: marks set during the call count too."""
        return cls(frozenset(labels), during_call)

    def should_select(self, call: ProductionCall) -> bool:
        return bool(self.labels.intersection(call.marks) if self.labels else call.marks)


@dataclass(frozen=True, slots=True)
class EveryCall:
    after_call: ClassVar[bool] = False

    def should_select(self, call: ProductionCall) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RecordedToolCall:
    """A tool call with JSON arguments, and its result or error."""

    name: str
    arguments: str
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class CallTrace:
    """A running production call: its tool calls if `recorded`, and its marks."""

    recorded: bool
    tool_calls: list[RecordedToolCall] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    ended: bool = False


#: The current production call, or the replay of a shadow run: calls within one are not production calls.
_current: ContextVar[object] = ContextVar("tuneloop_call", default=None)
_of_next: ContextVar[list[str] | None] = ContextVar("tuneloop_marks_of_next_call", default=None)
_of_block: ContextVar[tuple[str, ...]] = ContextVar("tuneloop_marks_of_block", default=())


class _Marking:
    """Set marks: in a `with` block they hold for it, otherwise for the next call, where `new` were added."""

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
    """Marks calls for shadow runs, in this thread or asyncio task and in copies of its context."""

    @staticmethod
    def mark(*labels: str) -> _Marking:
        """Mark the next call, the current one, or a block: `with TrainingContext.mark("hard"): …`."""
        if not labels or not all(isinstance(each, str) and each for each in labels):
            raise ValueError("mark: give at least one label, each a text")
        if (trace := current_trace()) is not None:
            new = [each for each in labels if each not in trace.marks]
            trace.marks.extend(new)
            return _Marking(labels, new, trace.marks)
        # A new list: earlier copies of the context must not see it; later copies share it, and one of their calls
        # takes the marks.
        earlier = _take_marks_of_next()
        new = [each for each in labels if each not in earlier]
        waiting = [*earlier, *new]
        _of_next.set(waiting)
        return _Marking(labels, new, waiting)

    @staticmethod
    def marks() -> tuple[str, ...]:
        """The labels of the next call."""
        return (*_of_block.get(), *(_of_next.get() or ()))


def current() -> object:
    return _current.get()


def current_trace() -> CallTrace | None:
    """The running production call of this context, or None."""
    found = _current.get()
    return found if isinstance(found, CallTrace) and not found.ended else None


@contextmanager
def in_context(what: object) -> Iterator[None]:
    """Make `what` current in this context."""
    token = _current.set(what)
    try:
        yield
    finally:
        _current.reset(token)


def take_marks() -> tuple[str, ...]:
    """Labels of the call that starts now: the surrounding blocks', and those for the next call."""
    return (*_of_block.get(), *_take_marks_of_next())


def _take_marks_of_next() -> tuple[str, ...]:
    waiting = _of_next.get()
    if not waiting:
        return ()
    found = tuple(waiting)
    waiting.clear()
    return found


def copy_or_same(thing: T) -> T:
    """A deep copy, or the thing itself if copying fails."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # noqa: BLE001 - any class may fail to copy
        return thing
