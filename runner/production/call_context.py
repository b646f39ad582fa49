"""What belongs to a production call while it runs, whichever function, task or copied thread context asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RecordedToolCall:
    """A tool's call by name and arguments (JSON), and what came of it."""

    name: str
    arguments: str
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class CallTrace:
    """A production call: its tool calls, if they are `recorded`, and what was marked while it ran.

    Arguments and results of its tools are copied for at most `copy_limit_s` each.
    """

    recorded: bool
    copy_limit_s: float = 0.001
    tool_calls: list[RecordedToolCall] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    ended: bool = False


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
        """Mark the next call, or all calls of a block: `with TrainingContext.mark("hard"): …`; within a call, this one.

        The labels go to the service with the rewards.
        """
        if not labels or not all(isinstance(each, str) and each for each in labels):
            raise ValueError("mark: give at least one label, each a text")
        if (trace := current_trace()) is not None:
            new = [each for each in labels if each not in trace.marks]
            trace.marks.extend(new)
            return _Marking(labels, new, trace.marks)
        # A list of its own: a context that was copied before must not see it. Those copied from now on share it, so
        # that one of their calls is the next one.
        earlier = take_marks()
        new = [each for each in labels if each not in earlier]
        waiting = [*earlier, *new]
        _of_next.set(waiting)
        return _Marking(labels, new, waiting)

    @staticmethod
    def marks() -> tuple[str, ...]:
        """The labels that the next call would have."""
        return (*_of_block.get(), *(_of_next.get() or ()))


#: A production call, or anything else that a shadow run stands for: within one, nothing is a production call.
_current: ContextVar[object] = ContextVar("tuneloop_call", default=None)

_of_next: ContextVar[list[str] | None] = ContextVar("tuneloop_marks_of_next_call", default=None)
_of_block: ContextVar[tuple[str, ...]] = ContextVar("tuneloop_marks_of_block", default=())


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
    """The labels that were meant for the next call, which is now."""
    waiting = _of_next.get()
    if not waiting:
        return ()
    found = tuple(waiting)
    waiting.clear()
    return found


def marks_of_block() -> tuple[str, ...]:
    """The labels of the blocks around."""
    return _of_block.get()
