"""Repeats calls of a production agent as shadow runs on the trained model, and sends their rewards."""

import copy
import functools
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, overload

from tuneloop.runner.collection.run_records import running_loop
from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.shadow.call_queue import CallQueue, NotJson, call_as_json
from tuneloop.runner.shadow.executor import (
    AgentFactory,
    RewardCalculator,
    ShadowCounts,
    ShadowExecutor,
    ShadowJob,
    ShadowWorker,
    in_thread,
)
from tuneloop.runner.shadow.production_calls import (
    CallTrace,
    ProductionCall,
    SamplingRateStrategy,
    Strategy,
    copy_or_same,
    current,
    current_trace,
    in_context,
    take_marks,
)
from tuneloop.runner.shadow.tools import Replay, ShadowTools, is_shadow_process

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

#: Copies a call's inputs before the app's agent can change them.
Capture = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclass(slots=True)
class _Observed:
    """A running production call; `call` is None if it is not repeated."""

    trace: CallTrace
    agent: AgentFactory | None
    call: ProductionCall | None = None
    select: Callable[[ProductionCall], bool] | None = None


@dataclass(kw_only=True)
class TrainingRunner:
    """Repeats a share of production's calls as shadow runs, and sends their rewards to the training service.

    `agent` makes a shadow run's agent, bound to the `model` that the `service` trains; it is called as production was.
    `reward_calculator` rewards its answer. `repeat_time` runs of one call form a group.

    Users get production's answer unchanged. Errors never reach the app: `counters()` counts them by kind, and the first
    of each kind is logged.

    At most `queue_size` calls wait and `concurrency` shadow runs run, each for at most `timeout_seconds`. Rewarded
    replies are committed every `commit_interval_seconds` (0: only at the end). Rewards for an unavailable service wait
    in the folder `outbox`; without one they are lost when the process ends.

    Inputs are copied in the app's thread, or by `capture`. Shadow runs use a thread of the app's process. With `queue`,
    a folder, the selected calls are written there as JSON for `python -m tuneloop.runner shadow`, which has the other
    settings.
    """

    service: str = ""
    model: str = ""
    agent: AgentFactory | None = None
    reward_calculator: RewardCalculator | None = None
    selection_strategy: Strategy = field(default_factory=lambda: SamplingRateStrategy.of(0.1))
    commit_interval_seconds: float = 300.0
    repeat_time: int = 1
    concurrency: int = 2
    queue_size: int = 1000
    timeout_seconds: float = 300.0
    outbox: str | os.PathLike[str] | None = None
    api_key: str | None = field(default=None, repr=False)
    capture: Capture | None = None
    tools: ShadowTools = field(default_factory=ShadowTools)
    queue: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if min(self.repeat_time, self.concurrency, self.queue_size) < 1:
            raise ValueError("repeat_time, concurrency and queue_size must be at least 1")
        if not self.timeout_seconds > 0:
            raise ValueError("timeout_seconds must be above 0")
        given = (self.service, self.model, self.agent, self.reward_calculator)
        if self.queue is None:
            if not all(given):
                raise ValueError("give service, model, agent and reward_calculator, or queue")
            Feedback(self.service, api_key=self.api_key).close()  # checks the URL and the key
        elif any(given):
            raise ValueError("queue: give service, model, agent and reward_calculator to `tuneloop.runner shadow`")
        self._counts = ShadowCounts()
        self._worker: ShadowWorker | None = None
        self._parents: ShadowWorker | None = None
        self._executor: ShadowExecutor | None = None
        self._pid = os.getpid()
        self._temporary: str | None = None
        strategy: Any = self.selection_strategy
        self._select = cast(Callable[[ProductionCall], bool], getattr(strategy, "should_select", strategy))
        self._asked_after = bool(getattr(strategy, "after_call", False))

    @staticmethod
    def builder() -> "TrainingRunnerBuilder":
        """A builder as in AgentScope's Java API."""
        return TrainingRunnerBuilder()

    def start(self) -> Self:
        """Start the worker, in a forked child again. Until then wrapped functions run unchanged."""
        self._leave_to_parent()
        if self._worker is not None or is_shadow_process():
            return self
        if self.queue is not None:
            queue = CallQueue(Path(self.queue), self._counts)

            async def leave(job: ShadowJob) -> None:
                if len(await in_thread(queue.waiting)) >= self.queue_size:
                    self._counts.add("dropped_queue_full")
                    return
                try:
                    text = call_as_json(job)
                except NotJson as error:
                    self._counts.fail("dropped_not_json", error)
                else:
                    await in_thread(lambda: queue.write(text))

            self._worker = ShadowWorker(leave, self._counts, concurrency=1, queue_size=self.queue_size)
        else:
            outbox = self.outbox
            if outbox is None:
                outbox = self._temporary = tempfile.mkdtemp(prefix="tuneloop-outbox-")
            assert self.reward_calculator is not None
            self._executor = executor = ShadowExecutor(
                service=self.service.rstrip("/").removesuffix("/v1"),
                model=self.model,
                api_key=self.api_key or "none",
                reward_calculator=self.reward_calculator,
                repeat_time=self.repeat_time,
                timeout_s=self.timeout_seconds,
                tools=self.tools,
                counts=self._counts,
                feedback=Feedback(self.service, outbox=outbox, api_key=self.api_key),
            )
            self._worker = ShadowWorker(
                executor.run,
                self._counts,
                concurrency=self.concurrency,
                queue_size=self.queue_size,
                commit=executor.commit,
                commit_interval_s=self.commit_interval_seconds,
            )
        self._pid = os.getpid()
        return self

    def _leave_to_parent(self) -> None:
        """Drop the worker in a forked child: its thread, executor and folder are the parent's."""
        if self._worker is None or self._pid == os.getpid():
            return
        if self._executor is not None:
            self._executor.feedback.close(0)  # since the fork it has only the child's feedback
        # Keep a reference: its garbage collection would close the parent's event loop.
        self._parents, self._worker = self._worker, None
        self._executor = self._temporary = None
        self._counts = ShadowCounts()  # a missing thread may hold the old lock

    def stop(self, timeout: float = 60.0) -> bool:
        """Run waiting calls, send and commit their rewards, and end; whether all was done in time."""
        self._leave_to_parent()
        worker, self._worker = self._worker, None
        if worker is None:
            return True
        deadline = time.monotonic() + timeout
        done = worker.stop(timeout)
        if self._executor is not None:
            done = self._executor.settle(deadline - time.monotonic()) and done
        if done and self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return done

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def counters(self) -> dict[str, int]:
        """Counts of calls, runs and feedback by kind."""
        found = self._counts.snapshot()
        if (executor := self._executor) is not None:
            names = ("pending", "sent", "refused")
            found |= {f"feedback_{name}": getattr(executor.feedback, name) for name in names}
        return found

    @overload
    def shadow(self, call: Wrapped) -> Wrapped: ...

    @overload
    def shadow(self, *, agent: AgentFactory | None = None) -> Callable[[Wrapped], Wrapped]: ...

    def shadow(self, call: Callable[..., Any] | None = None, *, agent: AgentFactory | None = None) -> Any:
        """Decorator form of `wrap`."""
        return self.wrap(call, agent=agent) if call is not None else lambda each: self.wrap(each, agent=agent)

    def wrap(self, call: Wrapped, *, agent: AgentFactory | None = None) -> Wrapped:
        """The same callable; `agent`, by default the runner's, repeats some of its calls. Raises TypeError."""
        if agent is not None and self.queue is not None:
            raise ValueError("wrap: with queue= the agent is that of `tuneloop.runner shadow`")
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
                return answer_later(observed, result)
            self._end(observed, result)
            return result

        async def answer_later(observed: _Observed, answering: Coroutine[Any, Any, Any]) -> Any:
            try:
                with in_context(observed.trace):
                    result = await answering
            except BaseException:
                observed.trace.ended = True
                raise
            self._end(observed, result)
            return result

        @functools.wraps(call)
        async def answer_async(*args: Any, **kwargs: Any) -> Any:
            return await answer(*args, **kwargs)

        return answer_async if inspect.iscoroutinefunction(inner) else answer  # type: ignore[return-value]

    def _begin(
        self, name: str, agent: AgentFactory | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Observed | None:
        """Select a call and copy its inputs. None: not a production call."""
        worker = self._worker
        if current_trace() is not None or isinstance(current(), Replay):
            return None
        marks = take_marks()  # always taken: they belong to this call
        if worker is None or not worker.running:
            return None
        self._counts.add("calls")
        observed = _Observed(CallTrace(recorded=False), agent)
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
        with self._counts.harmless("dropped_not_copied"):
            copied = copy.deepcopy((args, kwargs)) if self.capture is None else self.capture(args, kwargs)
            observed.call = replace(call, args=copied[0], kwargs=copied[1])
            observed.trace.recorded = True
        return observed

    def _end(self, observed: _Observed, result: Any) -> None:
        trace, call, worker = observed.trace, observed.call, self._worker
        trace.ended = True
        if call is None or worker is None:
            return
        with self._counts.harmless("runner_failed"):
            call = replace(call, marks=(*call.marks, *trace.marks), result=copy_or_same(result))
            worker.offer(
                ShadowJob(
                    call=call,
                    agent=observed.agent,
                    recorded=tuple(trace.tool_calls),
                    select=observed.select,
                    loop=running_loop(),
                )
            )


class TrainingRunnerBuilder:
    """Builds a TrainingRunner by setters, also the Java API's `trinity_endpoint` and `model_name`."""

    _NAMES: ClassVar = {"trinity_endpoint": "service", "model_name": "model"}

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[[Any], "TrainingRunnerBuilder"]:
        setting = self._NAMES.get(name, name)
        if setting not in TrainingRunner.__dataclass_fields__:
            raise AttributeError(f"TrainingRunner has no setting {name!r}")

        def give(value: Any) -> "TrainingRunnerBuilder":
            self._settings[setting] = value
            return self

        return give

    def build(self) -> TrainingRunner:
        """Raises ValueError."""
        return TrainingRunner(**self._settings)
