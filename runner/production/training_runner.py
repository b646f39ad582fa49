"""Lets production tune an agent: calls of the production agent are run again, out of sight, by one with our model."""

import functools
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast, get_args, overload

from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.production.bounded_copy import CopyTooLong, bounded_copy, copy_or_same
from tuneloop.runner.production.call_context import (
    CallTrace,
    current,
    current_trace,
    in_context,
    marks_of_block,
    take_marks,
)
from tuneloop.runner.production.shadow_counts import ShadowCounts
from tuneloop.runner.production.shadow_runs import AgentFactory, RewardCalculator, ShadowJob
from tuneloop.runner.production.shadow_tools import Replay, ShadowTools, is_shadow_process, running_loop
from tuneloop.runner.production.shadow_worker import RunIn, ShadowPlan, ShadowWorker
from tuneloop.runner.production.strategies import ProductionCall, SamplingRateStrategy, Strategy
from tuneloop.runner.production.thread_context import carry_into_threads

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

#: Copies the inputs of a call before the app's agent can change them.
Capture = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclass(slots=True)
class _Observed:
    """A production call under way; `call` is None if it will not be run again."""

    trace: CallTrace
    agent: AgentFactory
    call: ProductionCall | None = None
    select: Callable[[ProductionCall], bool] | None = None


@dataclass(kw_only=True)
class TrainingRunner:
    """Runs a share of production's calls again as shadow runs, and sends their rewards to the service that trains.

    `agent` makes the agent of a shadow run, bound to the `model` that the `service` trains; what it returns is called
    as production was. `reward_calculator` says what its answer is worth. `repeat_time` runs of one call make a group.

    Users get production's answer as it is. Nothing that goes wrong here reaches the app: it is counted, by kind, in
    `counters()`, and the first of each kind is logged.

    At most `queue_size` calls wait, `concurrency` shadow runs go on at once, each for at most `timeout_seconds`. Every
    `commit_interval_seconds` (0: only at the end) what was rewarded is released to the trainer. `outbox` is the folder
    where rewards wait for a service that is away; without one they are lost if the process ends before it is back.

    Inputs are copied in the app's thread for at most `capture_milliseconds`, or by `capture`; a tool's call whose
    arguments take longer than that is not recorded. Shadow runs compute in a
    process of their own where `agent`, `reward_calculator` and inputs can be sent there, unless `run_in` is "thread".
    """

    service: str
    model: str
    agent: AgentFactory
    reward_calculator: RewardCalculator
    selection_strategy: Strategy = field(default_factory=lambda: SamplingRateStrategy.of(0.1))
    commit_interval_seconds: float = 300.0
    repeat_time: int = 1
    concurrency: int = 2
    queue_size: int = 1000
    timeout_seconds: float = 300.0
    outbox: str | os.PathLike[str] | None = None
    api_key: str | None = field(default=None, repr=False)
    capture: Capture | None = None
    capture_milliseconds: float = 1.0
    tools: ShadowTools = field(default_factory=ShadowTools)
    run_in: RunIn = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError for what makes no sense."""
        if min(self.repeat_time, self.concurrency, self.queue_size) < 1:
            raise ValueError("repeat_time, concurrency and queue_size must be at least 1")
        if not min(self.timeout_seconds, self.capture_milliseconds) > 0:
            raise ValueError("timeout_seconds and capture_milliseconds must be above 0")
        if self.run_in not in get_args(RunIn):
            raise ValueError(f"run_in: {self.run_in!r} is none of {', '.join(get_args(RunIn))}")
        Feedback(self.service, api_key=self.api_key).close()  # which says what is wrong with a URL, or a key
        self._counts = ShadowCounts()
        self._worker: ShadowWorker | None = None
        self._parents: ShadowWorker | None = None
        self._pid = os.getpid()
        self._feedback: Feedback | None = None
        self._temporary: str | None = None
        self._copy_limit_s = self.capture_milliseconds / 1000
        strategy: Any = self.selection_strategy
        self._select = cast(Callable[[ProductionCall], bool], getattr(strategy, "should_select", strategy))
        self._asked_after = bool(getattr(strategy, "after_call", False))

    def start(self) -> Self:
        """Begin, in a forked child anew. Before, wrapped functions do as they would without this.

        Raises CannotSend if `run_in` is "process", and the agent or the reward calculator cannot be sent to one."""
        self._leave_to_parent()
        if self._worker is not None or is_shadow_process():
            return self
        outbox = self.outbox
        if outbox is None:
            outbox = self._temporary = tempfile.mkdtemp(prefix="tuneloop-outbox-")
        self._feedback = Feedback(self.service, outbox=outbox, api_key=self.api_key)
        carry_into_threads(lambda what: isinstance(what, Replay))
        self._worker, self._pid = ShadowWorker(_plan_of(self), self._counts, self._feedback), os.getpid()
        return self

    def _leave_to_parent(self) -> None:
        """In a child that was forked after a start: what was begun, its process and its folder are the parent's."""
        if self._worker is None or self._pid == os.getpid():
            return
        if self._feedback is not None:
            self._feedback.close(0)  # which since the fork has only what is said in the child
        # Kept: the end of a pipe that nobody refers to is flushed, into the parent's.
        self._parents, self._worker = self._worker, None
        self._feedback = self._temporary = None
        self._counts = ShadowCounts()  # the lock of the old ones may be held, by a thread that is not here

    def stop(self, timeout: float = 60.0) -> bool:
        """Run what waits, send and commit what it earned, and end; whether all of it was done in so many seconds."""
        self._leave_to_parent()
        worker, self._worker = self._worker, None
        if worker is None:
            return True
        done = worker.stop(timeout)
        if done and self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return done

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def counters(self) -> dict[str, int]:
        """What became of calls and runs, by kind, and of the feedback on them."""
        found = self._counts.snapshot()
        if (feedback := self._feedback) is not None:
            found |= {f"feedback_{name}": getattr(feedback, name) for name in ("pending", "sent", "refused")}
        return found

    @overload
    def shadow(self, call: Wrapped) -> Wrapped: ...

    @overload
    def shadow(self, *, agent: AgentFactory | None = None) -> Callable[[Wrapped], Wrapped]: ...

    def shadow(self, call: Callable[..., Any] | None = None, *, agent: AgentFactory | None = None) -> Any:
        """Decorate a function of production's: see `wrap`."""
        return self.wrap(call, agent=agent) if call is not None else lambda each: self.wrap(each, agent=agent)

    def wrap(self, call: Wrapped, *, agent: AgentFactory | None = None) -> Wrapped:
        """The same callable, sync or async, of whose calls some are run again by `agent`, or else the runner's.

        Raises TypeError for a generator, whose answer could not be compared.
        """
        inner = call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise TypeError("wrap: a function that yields; wrap one that returns its answer")
        name, agent = getattr(call, "__qualname__", type(call).__name__), agent or self.agent

        @functools.wraps(call)
        def answer(*args: Any, **kwargs: Any) -> Any:
            observed = self._begin(name, agent, args, kwargs)
            if observed is None:
                return call(*args, **kwargs)
            try:
                with in_context(observed.trace):
                    result = call(*args, **kwargs)
            except BaseException:
                observed.trace.ended = True
                raise
            if inspect.iscoroutine(result):
                return self._answer_later(observed, result)
            self._end(observed, result)
            return result

        @functools.wraps(call)
        async def answer_async(*args: Any, **kwargs: Any) -> Any:
            return await answer(*args, **kwargs)

        return answer_async if inspect.iscoroutinefunction(inner) else answer  # type: ignore[return-value]

    async def _answer_later(self, observed: _Observed, answering: Coroutine[Any, Any, Any]) -> Any:
        try:
            with in_context(observed.trace):
                result = await answering
        except BaseException:
            observed.trace.ended = True
            raise
        self._end(observed, result)
        return result

    def _begin(self, name: str, agent: AgentFactory, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Observed | None:
        """Before a call: whether it may be run again, and then what it was asked. None: it is no production call."""
        worker = self._worker
        if current_trace() is not None or isinstance(current(), Replay):
            return None
        marks = (*marks_of_block(), *take_marks())  # of this call, whether or not anybody asks for them
        if worker is None or not worker.running:
            return None
        self._counts.add("calls")
        observed = _Observed(CallTrace(recorded=False, copy_limit_s=self._copy_limit_s), agent)
        call = ProductionCall(name=name, args=args, kwargs=kwargs, marks=marks)
        if self._asked_after:
            observed.select = self._select
        else:
            selected = False
            with self._counts.harmless("strategy_failed"):
                selected = bool(self._select(call))
            if not selected:
                return observed
            self._counts.add("selected")
        with self._counts.harmless("dropped_not_copied", {CopyTooLong: "dropped_too_large"}):
            copied_args, copied_kwargs = _copies_of(args, kwargs, self.capture, self._copy_limit_s)
            observed.call = replace(call, args=copied_args, kwargs=copied_kwargs)
            observed.trace.recorded = True
        return observed

    def _end(self, observed: _Observed, result: Any) -> None:
        """After it: hand it over."""
        trace, call, worker = observed.trace, observed.call, self._worker
        trace.ended = True
        if call is None or worker is None:
            return
        with self._counts.harmless("runner_failed"):
            call = replace(call, marks=(*call.marks, *trace.marks), result=copy_or_same(result, self._copy_limit_s))
            worker.offer(
                ShadowJob(
                    call=call,
                    agent=observed.agent,
                    recorded=tuple(trace.tool_calls),
                    select=observed.select,
                    loop=running_loop(),
                )
            )


def _plan_of(runner: TrainingRunner) -> ShadowPlan:
    return ShadowPlan(
        service=runner.service.rstrip("/").removesuffix("/v1"),
        model=runner.model,
        api_key=runner.api_key or "none",
        agent=runner.agent,
        reward_calculator=runner.reward_calculator,
        repeat_time=runner.repeat_time,
        commit_interval_s=runner.commit_interval_seconds,
        concurrency=runner.concurrency,
        queue_size=runner.queue_size,
        timeout_s=runner.timeout_seconds,
        tools=runner.tools,
        run_in=runner.run_in,
    )


def _copies_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], capture: Capture | None, limit_s: float
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Inputs of which nothing is shared. Raises what says why there are none."""
    if capture is not None:
        return capture(args, kwargs)
    copied: tuple[tuple[Any, ...], Mapping[str, Any]] = bounded_copy((args, kwargs), limit_s)
    return copied
