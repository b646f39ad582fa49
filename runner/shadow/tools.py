"""Makes tools safe in shadow runs: they replay production's record, run if read-only, or refuse."""

import asyncio
import copy
import functools
import inspect
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from tuneloop.runner.collection.run_records import running_loop
from tuneloop.runner.shadow.production_calls import (
    CallTrace,
    RecordedToolCall,
    copy_or_same,
    current,
    current_trace,
    in_context,
)

Tool = TypeVar("Tool", bound=Callable[..., Any])
Refusal = Callable[[str, str], Any]

_in_shadow_process = threading.Event()  # set in a process of shadow runs, where no call is production's
enter_shadow_process, is_shadow_process = _in_shadow_process.set, _in_shadow_process.is_set


@dataclass(frozen=True, slots=True)
class ShadowToolCall:
    """A tool call of a shadow run, and the origin of its result."""

    name: str
    arguments: str
    outcome: Literal["recorded", "ran", "refused"]


class Replay:
    """Tool behaviour of one shadow run: equal calls get the recorded results in order; the last one repeats."""

    def __init__(self, recorded: Sequence[RecordedToolCall], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.calls: list[ShadowToolCall] = []
        self.loop = loop
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[RecordedToolCall]] = defaultdict(list)
        for each in recorded:
            self._waiting[each.name, each.arguments].append(each)

    def next_recorded(self, name: str, arguments: str) -> RecordedToolCall | None:
        with self._lock:
            equal = self._waiting.get((name, arguments))
            if not equal:
                return None
            return equal.pop(0) if len(equal) > 1 else equal[0]


def refuse_as_json(name: str, arguments: str) -> Any:
    """A refusal as a tool result that a model can read."""
    why = f"{name} was not run: this is a rehearsal without side effects, and there is no record of this call"
    return json.dumps({"error": why, "tool": name, "arguments": json.loads(arguments)})


class ShadowTools:
    """Wraps an app's tools: production calls are unchanged, shadow runs execute nothing that writes.

    `refusal(name, arguments)` makes the result of a refused call, for frameworks whose tools do not return text.
    """

    def __init__(self, refusal: Refusal = refuse_as_json) -> None:
        self._refusal = refusal
        self._tools: dict[str, _Tool | None] = {}  # by name; None if several functions share it

    def bound_to(self, replay: Replay) -> "RunTools":
        return RunTools(self._tools, replay, self._refusal)

    @overload
    def tool(self, function: Tool) -> Tool: ...

    @overload
    def tool(self, *, read_only: bool = False, name: str | None = None) -> Callable[[Tool], Tool]: ...

    def tool(
        self, function: Callable[..., Any] | None = None, *, read_only: bool = False, name: str | None = None
    ) -> Any:
        """Wrap or decorate a function; `read_only` ones may run in shadow runs. Raises TypeError for generators."""

        def wrap(function: Callable[..., Any]) -> Any:
            named = name or str(getattr(function, "__name__", type(function).__name__))
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"{named}: a tool that yields cannot be recorded; let it return its result")
            tool = _Tool(function, named, read_only, self._refusal)
            known = self._tools.setdefault(named, tool)
            if known is not tool and (known is None or known.function != function):
                self._tools[named] = None
            return tool.within(None)

        return wrap if function is None else wrap(function)


class RunTools(Mapping[str, Callable[..., Any]]):
    """Tools of one shadow run by name, usable in any thread. Unknown or ambiguous tools are refused."""

    def __init__(self, tools: Mapping[str, "_Tool | None"], replay: Replay, refusal: Refusal = refuse_as_json) -> None:
        self._tools, self._replay, self._refusal = tools, replay, refusal

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if (tool := self._tools.get(name)) is not None:
            return tool.within(self._replay)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            arguments = json.dumps({**kwargs, **({"args": args} if args else {})}, sort_keys=True, default=repr)
            self._replay.calls.append(ShadowToolCall(name, arguments, "refused"))
            return self._refusal(name, arguments)

        return refuse

    def __iter__(self) -> Iterator[str]:
        return (name for name, tool in list(self._tools.items()) if tool is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a model's call; an async tool returns an awaitable."""
        return self[name](**arguments)


class _Tool:
    def __init__(self, function: Callable[..., Any], name: str, read_only: bool, refusal: Refusal) -> None:
        self.function, self._name = function, name
        self._read_only, self._refusal = read_only, refusal
        self._signature = inspect.signature(function)
        self._is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        self._loop: asyncio.AbstractEventLoop | None = None  # production's last event loop

    def within(self, bound: Replay | None) -> Callable[..., Any]:
        """The tool in one shadow run; with None, in the current context."""

        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            replay = bound or current()
            if is_shadow_process() and not isinstance(replay, Replay):
                replay = Replay(())  # a thread without a run
            if isinstance(replay, Replay):
                # Replay, run or refuse. Raises the recorded error.
                arguments = self._arguments(args, kwargs)
                if (found := replay.next_recorded(self._name, arguments)) is not None:
                    replay.calls.append(ShadowToolCall(self._name, arguments, "recorded"))
                    if found.error is not None:
                        raise _copy_of(found.error)
                    return copy_or_same(found.result)
                may_run = self._read_only and (
                    not self._is_async or self._home(replay) is not None or is_shadow_process()
                )
                replay.calls.append(ShadowToolCall(self._name, arguments, "ran" if may_run else "refused"))
                if not may_run:
                    return self._refusal(self._name, arguments)
                with in_context(replay):
                    result = self.function(*args, **kwargs)
                return self._await_at_home(result, replay) if inspect.iscoroutine(result) else result
            self._loop = running_loop() or self._loop
            trace = current_trace()
            if trace is None or not trace.recorded:
                return self.function(*args, **kwargs)
            return self._call_recorded(trace, args, kwargs)

        @functools.wraps(self.function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return call_async if self._is_async else call

    def _call_recorded(self, trace: CallTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            arguments = self._arguments(args, kwargs)
        except TypeError:
            return self.function(*args, **kwargs)  # raises the same error

        def record(result: Any, error: Exception | None = None) -> None:
            copied = None if error is None else _copy_of(error)
            trace.tool_calls.append(RecordedToolCall(self._name, arguments, copy_or_same(result), copied))

        async def record_later(answering: Coroutine[Any, Any, Any]) -> Any:
            try:
                result = await answering
            except Exception as error:
                record(None, error)
                raise
            record(result)
            return result

        try:
            result = self.function(*args, **kwargs)
        except Exception as error:
            record(None, error)
            raise
        if inspect.iscoroutine(result):
            return record_later(result)
        record(result)
        return result

    def _home(self, replay: Replay) -> asyncio.AbstractEventLoop | None:
        """Production's event loop, if it still runs."""
        return next((each for each in (self._loop, replay.loop) if each is not None and each.is_running()), None)

    async def _await_at_home(self, work: Coroutine[Any, Any, Any], replay: Replay) -> Any:
        """Await in production's event loop, to which the tool's connections belong."""
        home = running_loop() if is_shadow_process() else self._home(replay)
        if home is None:
            work.close()
            raise RuntimeError(f"{self._name} was not run: production has no running event loop")
        if home is running_loop():
            with in_context(replay):
                return await work

        async def catch_errors() -> tuple[Any, Exception | None]:
            """The result or the error, which must not reach production's event loop."""
            try:
                with in_context(replay):
                    return await work, None
            except Exception as error:  # noqa: BLE001 - an outcome of the shadow run
                return None, error
            except (SystemExit, asyncio.CancelledError) as error:  # would end the loop or the runner's task
                return None, RuntimeError(repr(error))

        result, error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(catch_errors(), home))
        if error is not None:
            raise error
        return result

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments as JSON by name. Raises TypeError if they do not fit the function."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = {name: value for name, value in bound.arguments.items() if name not in {"self", "cls"}}
        try:
            return json.dumps(named, sort_keys=True, default=_repr_or_kind)
        except Exception:  # noqa: BLE001 - keys that are no texts, cycles, the app's classes
            return json.dumps({"arguments": _repr_or_kind(named)})


def _copy_of(error: Exception) -> Exception:
    """A copy of the error, so that production's keeps its own traceback."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - any class may fail to copy
        copied = None
    return copied if type(copied) is type(error) else RuntimeError(_repr_or_kind(error))


def _repr_or_kind(thing: object) -> str:
    """`repr`, or the class's name if that raises."""
    try:
        return repr(thing)
    except Exception:  # noqa: BLE001 - any class may raise
        return f"<{type(thing).__qualname__}>"
