"""Tools that are safe in shadow runs: they answer from production's record, run if they only read, or refuse."""

import asyncio
import copy
import functools
import inspect
import json
import math
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from tuneloop.runner.production.bounded_copy import CopyTooLong, bounded_json, copy_or_same, repr_or_kind
from tuneloop.runner.production.call_context import RecordedToolCall, current, current_trace, in_context

Tool = TypeVar("Tool", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ShadowToolCall:
    """A tool's call in a shadow run, and where its result came from."""

    name: str
    arguments: str
    outcome: Literal["recorded", "ran", "refused"]


class Replay:
    """What tools do in one shadow run. Equal calls get the recorded results in their order; the last one repeats.

    `loop` is where production made the call that is run again.
    """

    def __init__(self, recorded: Sequence[RecordedToolCall], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.calls: list[ShadowToolCall] = []
        self.loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[RecordedToolCall]] = defaultdict(list)
        for each in recorded:
            self._waiting[each.name, each.arguments].append(each)

    def next_recorded(self, name: str, arguments: str) -> RecordedToolCall | None:
        """The recorded call that answers this one, if one does."""
        with self._lock:
            equal = self._waiting.get((name, arguments))
            if not equal:
                return None
            return equal.pop(0) if len(equal) > 1 else equal[0]


#: Has a tool of the app's called there, by its name: its result, or its error, and the calls of the run so far.
Ask = Callable[[str, tuple[Any, ...], dict[str, Any]], Future[tuple[Any, Exception | None, list[ShadowToolCall]]]]


class RemoteReplay(Replay):
    """Of a shadow run in another process than the app's, where its tools are and what is known of them."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(())
        self._ask = ask

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the tool gives, or raises."""
        return self._take_answer(self._ask(name, args, kwargs).result())

    async def call_async(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, awaited."""
        return self._take_answer(await asyncio.wrap_future(self._ask(name, args, kwargs)))

    def _take_answer(self, answer: tuple[Any, Exception | None, list[ShadowToolCall]]) -> Any:
        result, error, calls = answer
        if len(calls) > len(self.calls):  # answers overtake one another
            self.calls = calls
        if error is not None:
            raise error
        return result


#: Set in a process of shadow runs: what is called there outside of any run stands for none of production's.
_in_shadow_process = threading.Event()


def live_in_shadow_process() -> None:
    """From now on nothing that is called in this process is production's."""
    _in_shadow_process.set()


def is_shadow_process() -> bool:
    """Whether this process is one of shadow runs."""
    return _in_shadow_process.is_set()


def refuse_as_json(name: str, arguments: str) -> Any:
    """A tool's result that says that it was not run: what a model can read."""
    why = (
        f"{name} was not run: this is a rehearsal, in which nothing may be changed, and there is no record of this call"
    )
    return json.dumps({"error": why, "tool": name, "arguments": json.loads(arguments)})


class ShadowTools:
    """Wraps an app's tools. In production calls they do as ever; in shadow runs nothing that writes is run.

    `refusal(name, arguments)` makes the result of a call that is refused, for frameworks whose tools return other
    things than text.
    """

    def __init__(self, refusal: Callable[[str, str], Any] = refuse_as_json) -> None:
        self._refusal = refusal
        #: By name; None where several functions were given the same.
        self._tools: dict[str, _Tool | None] = {}

    def bound_to(self, replay: Replay) -> "RunTools":
        """The tools of one shadow run."""
        return RunTools(self._tools, replay, self._refusal)

    @overload
    def tool(self, function: Tool) -> Tool: ...

    @overload
    def tool(self, *, read_only: bool = False, name: str | None = None) -> Callable[[Tool], Tool]: ...

    def tool(
        self, function: Callable[..., Any] | None = None, *, read_only: bool = False, name: str | None = None
    ) -> Any:
        """Wrap a function, sync or async; also a decorator. `read_only` declares that it may run in shadow runs.

        Raises TypeError for a generator, whose result cannot be recorded.
        """
        if function is None:
            return lambda each: self._wrap(each, read_only, name)
        return self._wrap(function, read_only, name)

    def _wrap(self, function: Callable[..., Any], read_only: bool, name: str | None) -> Any:
        name = name or str(getattr(function, "__name__", type(function).__name__))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{name}: a tool that yields cannot be recorded; let it return its result")
        tool = _Tool(function, name, read_only, self._refusal)
        known = self._tools.setdefault(name, tool)
        if known is not tool and (known is None or known.function != function):
            self._tools[name] = None
        return tool.within(None)


class RunTools(Mapping[str, Callable[..., Any]]):
    """The tools of one shadow run by name, bound to it in whatever thread they are called.

    A name that no tool has, or several have, is answered too: by a function that refuses.
    """

    def __init__(
        self, tools: Mapping[str, "_Tool | None"], replay: Replay, refusal: Callable[[str, str], Any] = refuse_as_json
    ) -> None:
        self._tools, self._replay, self._refusal = tools, replay, refusal

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if (tool := self._tools.get(name)) is not None:
            return tool.within(self._replay)
        return functools.partial(self._refuse, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, tool in list(self._tools.items()) if tool is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What a model's call gives; of an async tool, what is to be awaited."""
        return self[name](**arguments)

    def _refuse(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        arguments = json.dumps({**kwargs, **({"args": args} if args else {})}, sort_keys=True, default=repr)
        self._replay.calls.append(ShadowToolCall(name, arguments, "refused"))
        return self._refusal(name, arguments)


class RemoteTools(RunTools):
    """The app's tools for a shadow run in another process: their names, and whether they are async."""

    def __init__(self, names: Mapping[str, bool], replay: RemoteReplay) -> None:
        super().__init__({}, replay)
        self._names, self._remote = names, replay

    def __getitem__(self, name: str) -> Callable[..., Any]:
        remote = self._remote

        def call(*args: Any, **kwargs: Any) -> Any:
            return remote.call(name, args, kwargs)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await remote.call_async(name, args, kwargs)

        return call_async if self._names.get(name) else call

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


@dataclass(slots=True)
class _Run:
    """The tool itself is to be run, in production or for a shadow run."""

    arguments: str | None
    replay: Replay | None = None
    result: Any = None


@dataclass(frozen=True, slots=True)
class _Answer:
    result: Any


class _Tool:
    def __init__(
        self, function: Callable[..., Any], name: str, read_only: bool, refusal: Callable[[str, str], Any]
    ) -> None:
        self.function, self._name = function, name
        self._read_only, self._refusal = read_only, refusal
        self._signature = inspect.signature(function)
        self._is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        #: Where production called it last.
        self._loop: asyncio.AbstractEventLoop | None = None

    def within(self, replay: Replay | None) -> Callable[..., Any]:
        """The tool in one shadow run; with None, wherever it is called."""

        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(remote := replay or current(), RemoteReplay):
                return remote.call(self._name, args, kwargs)
            todo = self._decide(replay, args, kwargs)
            if isinstance(todo, _Answer):
                return todo.result
            with self._recording(todo), in_context(replay or current()):
                todo.result = self.function(*args, **kwargs)
            if todo.replay is not None and inspect.iscoroutine(todo.result):
                return self._await_at_home(todo.result, todo.replay)
            return todo.result

        @functools.wraps(self.function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if isinstance(remote := replay or current(), RemoteReplay):
                return await remote.call_async(self._name, args, kwargs)
            todo = self._decide(replay, args, kwargs)
            if isinstance(todo, _Answer):
                return todo.result
            if todo.replay is not None:
                with in_context(todo.replay):
                    return await self._await_at_home(self.function(*args, **kwargs), todo.replay)
            with self._recording(todo), in_context(replay or current()):
                todo.result = await self.function(*args, **kwargs)
            return todo.result

        return call_async if self._is_async else call

    def _decide(self, bound: Replay | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Run | _Answer":
        """What is to be done. Raises what the recorded call raised."""
        replay, trace = bound or current(), current_trace()
        if is_shadow_process() and not isinstance(replay, Replay):
            replay = Replay(())  # of a thread that no run has begun
        if not isinstance(replay, Replay):
            self._loop = running_loop() or self._loop
            if trace is None or not trace.recorded:
                return _Run(None)
            return _Run(self._bounded_arguments(args, kwargs, trace.copy_limit_s))
        if (arguments := self._arguments(args, kwargs)) is None:
            return _Run(None, replay)  # which raises TypeError, and does nothing
        if (found := replay.next_recorded(self._name, arguments)) is not None:
            replay.calls.append(ShadowToolCall(self._name, arguments, "recorded"))
            if found.error is not None:
                raise _copy_of(found.error)
            return _Answer(copy_or_same(found.result))
        may_run = self._read_only and (not self._is_async or self._home(replay) is not None)
        replay.calls.append(ShadowToolCall(self._name, arguments, "ran" if may_run else "refused"))
        return _Run(None, replay) if may_run else _Answer(self._refusal(self._name, arguments))

    def _home(self, replay: Replay) -> asyncio.AbstractEventLoop | None:
        """The event loop that production calls it in, if that still runs."""
        return next((each for each in (self._loop, replay.loop) if each is not None and each.is_running()), None)

    async def _await_at_home(self, work: Coroutine[Any, Any, Any], replay: Replay) -> Any:
        """What a shadow run's call gives, awaited in production's event loop.

        Connections and locks that the tool shares with production belong to that loop: one that another loop left
        behind would fail production.
        """
        home = self._home(replay)
        if home is None:
            work.close()
            raise RuntimeError(f"{self._name} was not run: production has no event loop that it could run in")
        if home is running_loop():
            with in_context(replay):
                return await work
        result, error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_come_to_end(work, replay), home))
        if error is not None:
            raise error
        return result

    @contextmanager
    def _recording(self, run: "_Run") -> Iterator[None]:
        """Record what comes of it, if it is a call of production's that is recorded."""
        try:
            yield
        except Exception as error:
            self._record(run, error)
            raise
        self._record(run)

    def _record(self, run: "_Run", error: Exception | None = None) -> None:
        trace = current_trace()
        if trace is not None and run.arguments is not None:
            result = copy_or_same(run.result, trace.copy_limit_s)
            copied = None if error is None else _copy_of(error)
            trace.tool_calls.append(RecordedToolCall(self._name, run.arguments, result, copied))

    def _bounded_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float) -> str | None:
        """The same, in production; None, too, where they take longer to write than that."""
        try:
            return self._arguments(args, kwargs, limit_s)
        except CopyTooLong:
            return None

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float = math.inf) -> str | None:
        """The arguments as JSON, each under its name; None where they do not fit the function."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        named = {name: value for name, value in bound.arguments.items() if name not in {"self", "cls"}}
        return bounded_json(named, limit_s)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of asyncio's that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _come_to_end(work: Awaitable[Any], replay: Replay) -> tuple[Any, Exception | None]:
    """The result or the error of what a shadow run does in production's event loop, which must not feel it."""
    try:
        with in_context(replay):
            return await work, None
    except Exception as error:  # noqa: BLE001 - the shadow run's to hear of
        return None, error
    except (SystemExit, asyncio.CancelledError) as error:  # the one would end the loop, the other the runner's task
        return None, RuntimeError(repr(error))


def _copy_of(error: Exception) -> Exception:
    """The same error, but another object: production's keeps its traceback to itself."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - any class may refuse to be copied in its own way
        copied = None
    return copied if type(copied) is type(error) else RuntimeError(repr_or_kind(error))
