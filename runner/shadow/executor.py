"""Runs shadow runs: repeats production calls with an agent on the service's model, in a thread with an event loop."""

import asyncio
import contextvars
import inspect
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tuneloop.runner.collection.run_records import in_daemon_thread
from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.models.bound_model import CallDefaults, ClientKind, make_model
from tuneloop.runner.models.run import Run
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.rewards.composite import Score
from tuneloop.runner.shadow.production_calls import ProductionCall, RecordedToolCall, copy_or_same, in_context
from tuneloop.runner.shadow.tools import Replay, RunTools, ShadowToolCall, ShadowTools

#: Kinds of events, in the order of a call's life.
KINDS = (
    "calls",  # of wrapped functions
    "strategy_failed",
    "selected",
    "dropped_not_copied",  # the inputs cannot be copied
    "dropped_not_json",  # the call has no JSON form for the queue
    "dropped_queue_full",
    "dropped_at_stop",
    "queued",  # written to the queue's folder
    "set_aside",  # invalid files of the queue, or with too many attempts
    "runs",  # started shadow runs
    "shadow_failed",
    "shadow_timed_out",
    "service_away",  # the service failed to answer a run
    "completed",
    "reward_failed",
    "unrewarded",  # the calculator returned None
    "feedback_failed",
    "rewarded",
    "commits",
    "commit_failed",
    "runner_failed",  # an error of ours
)

_LOOK_S = 0.02  # seconds between two checks for offered jobs
_SHARE_OF_STOP = 0.7  # share of a stop's time for runs; the rest is for their rewards

log = logging.getLogger("tuneloop.runner.shadow")


class ShadowCounts:
    """Thread-safe counts of calls and runs by kind; logs the first failure of each kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._logged: set[str] = set()

    def add(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self._counts[kind] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def fail(self, kind: str, error: BaseException) -> None:
        """Count a failure; log the first of its kind with its traceback."""
        self.add(kind)
        with self._lock:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning("%s: %r; further ones are counted, not logged", kind, error, exc_info=error)

    @contextmanager
    def harmless(self, kind: str) -> Iterator[None]:
        """Count the block's exception and continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - must not reach the app
            self.fail(kind, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRun(Run):
    """A shadow agent's run and its model's name; `tools` are the app's, bound to the run, and write nothing."""

    model: str
    tools: RunTools = field(default_factory=lambda: RunTools({}, Replay(())), compare=False, repr=False)

    def chat_model(self, client: ClientKind = "auto", **defaults: Any) -> Any:
        """An AgentScope chat model, or without AgentScope an AsyncOpenAI client; `defaults` are sampling parameters."""
        return make_model(self, CallDefaults(model_name=self.model, **defaults), client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowResult:
    """The shadow agent's answer beside the production call, for the reward."""

    run: ShadowRun
    call: ProductionCall
    result: Any
    tool_calls: tuple[ShadowToolCall, ...]

    @property
    def production_result(self) -> Any:
        return self.call.result


#: Makes a shadow run's agent, which is called as production was.
AgentFactory = Callable[[ShadowRun], Callable[..., Any]]

Reward = float | bool | Score | None  # a number, a thumb, or a Score with components; None: no reward
RewardCalculator = Callable[[ShadowResult], Reward | Awaitable[Reward]]


@dataclass(slots=True, kw_only=True)
class ShadowJob:
    """An answered production call and its event `loop`, if any. `select` decides whether to run it."""

    call: ProductionCall
    recorded: tuple[RecordedToolCall, ...]
    agent: AgentFactory | None = None
    select: Callable[[ProductionCall], bool] | None = None
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(slots=True, kw_only=True)
class ShadowExecutor:
    """Runs shadow runs, each for at most `timeout_s`, sends their rewards, and commits them."""

    service: str
    model: str
    api_key: str
    reward_calculator: RewardCalculator
    repeat_time: int
    timeout_s: float
    tools: ShadowTools
    counts: ShadowCounts
    feedback: Feedback
    to_commit: bool = False

    async def run(self, job: ShadowJob) -> None:
        """The shadow runs of one call, as one task, so that their rewards are compared."""
        task_id = f"shadow-{uuid.uuid4()}"
        for number in range(self.repeat_time):
            replay = Replay(job.recorded, job.loop)
            run = ShadowRun(
                service=self.service,
                task_id=task_id,
                run_id=str(number),
                api_key=self.api_key,
                model=self.model,
                tools=self.tools.bound_to(replay),
            )
            self.counts.add("runs")
            reward = await self._reward_of(job, run, replay)
            if reward is None:
                continue

            def send_reward(run: ShadowRun = run, reward: bool | float | Score = reward) -> None:
                with self.feedback.batch() as many:
                    if isinstance(reward, bool):
                        many.thumb(run, reward)
                    else:
                        many.reward(run, reward)
                    for label in dict.fromkeys(job.call.marks):
                        many.label(run, label, metric=f"mark:{label}")

            with self.counts.harmless("feedback_failed"):
                await in_thread(send_reward)
                self.counts.add("rewarded")
                self.to_commit = True

    async def _reward_of(self, job: ShadowJob, run: ShadowRun, replay: Replay) -> Reward:
        assert job.agent is not None
        make = job.agent

        def act() -> Any:
            # Copies for each run: agents modify their inputs.
            args, kwargs = copy_or_same(job.call.args), copy_or_same(dict(job.call.kwargs))
            return make(run)(*args, **kwargs)

        answered = await self._within_time("shadow", finish(act, replay))
        if answered is None:
            return None
        if sentence := run.calls.outage:
            self.counts.fail("service_away", ConnectionError(sentence))
            return None
        self.counts.add("completed")
        result = ShadowResult(run=run, call=job.call, result=answered[0], tool_calls=tuple(replay.calls))
        judged_in = Replay((), job.loop)
        rewarded = await self._within_time("reward", finish(lambda: self.reward_calculator(result), judged_in))
        if rewarded == (None,):
            self.counts.add("unrewarded")
        reward: Reward = None if rewarded is None else rewarded[0]
        return reward

    async def _within_time(self, kind: str, work: Any) -> tuple[Any] | None:
        """The result, or None. Work that cannot be cancelled keeps its place until it ends, which bounds threads."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        if not done:
            late = TimeoutError(f"not done after {self.timeout_s:g} s")
            self.counts.fail(f"{kind}_timed_out" if kind == "shadow" else f"{kind}_failed", late)
            task.cancel()
            await asyncio.wait({task})
            return None
        try:
            return (task.result(),)
        except Exception as error:  # noqa: BLE001 - must not reach the app
            self.counts.fail(f"{kind}_failed", error)
            return None

    def commit(self) -> bool:
        """Commit new rewards, if any; False if that failed."""
        if not self.to_commit:
            return True
        self.to_commit = False
        try:
            self.feedback.commit()
        except Exception as error:  # noqa: BLE001 - must not reach the app
            self.to_commit = True
            self.counts.fail("commit_failed", error)
            return False
        self.counts.add("commits")
        return True

    def settle(self, timeout: float) -> bool:
        """Send and commit all rewards, and close; whether that took at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        sent = self.feedback.flush(max(0.0, timeout))
        committed = not sent or self.commit()
        return self.feedback.close(max(0.0, deadline - time.monotonic())) and sent and committed


class ShadowWorker:
    """Handles jobs in a thread with an event loop, at most `concurrency` at once, and commits at intervals."""

    def __init__(
        self,
        handle: Callable[[ShadowJob], Awaitable[None]],
        counts: ShadowCounts,
        *,
        concurrency: int,
        queue_size: int,
        commit: Callable[[], object] = bool,
        commit_interval_s: float = 0,
    ) -> None:
        self._handle, self._counts = handle, counts
        self._concurrency, self._queue_size = concurrency, queue_size
        self._commit, self._commit_interval_s = commit, commit_interval_s
        self._loop = asyncio.new_event_loop()
        self._offered: deque[ShadowJob] = deque()
        self._jobs: asyncio.Queue[ShadowJob] = asyncio.Queue()
        self._lock, self._waiting, self._accepting = threading.Lock(), 0, True
        self._thread = threading.Thread(target=self._run, name="tuneloop-training-runner", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it accepts jobs; False in a forked child, which lacks the thread."""
        return self._accepting and self._thread.is_alive()

    def offer(self, job: ShadowJob) -> None:
        """Accept a job, or count it as dropped. The loop polls: waking it would delay the app."""
        with self._lock:
            if self._waiting >= self._queue_size:
                self._counts.add("dropped_queue_full")
                return
            self._waiting += 1
        self._offered.append(job)

    def stop(self, timeout: float) -> bool:
        """Handle waiting jobs for a share of the time, and end; whether all were handled."""
        self._accepting, done = False, False
        if not self._thread.is_alive():
            return False
        seconds = timeout * _SHARE_OF_STOP

        async def drain() -> bool:
            self._take_offered()
            try:
                async with asyncio.timeout(seconds):
                    await self._jobs.join()
            except TimeoutError:
                with self._lock:
                    self._counts.add("dropped_at_stop", self._waiting)
                return False
            return True

        draining = asyncio.run_coroutine_threadsafe(drain(), self._loop)
        try:
            done = draining.result(timeout)
        except TimeoutError:
            draining.cancel()  # an agent blocks the loop
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout - seconds if done else 0.1)
        return done

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def look() -> None:
            while True:
                self._take_offered()
                await asyncio.sleep(_LOOK_S)

        async def commit_at_intervals() -> None:
            while self._commit_interval_s > 0:
                await asyncio.sleep(self._commit_interval_s)
                await in_thread(self._commit)

        tasks = {self._loop.create_task(self._work()) for _ in range(self._concurrency)}
        tasks |= {self._loop.create_task(each) for each in (look(), commit_at_intervals())}
        self._loop.run_forever()
        tasks |= asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        for _ in range(3):  # enough for cancelled tasks that wait for no thread
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(close_connections())
        if all(task.done() for task in tasks):
            self._loop.close()

    def _take_offered(self) -> None:
        while self._offered:
            self._jobs.put_nowait(self._offered.popleft())

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            with self._lock:
                self._waiting -= 1
            with self._counts.harmless("runner_failed"):
                selected = job.select is None
                if (select := job.select) is not None:
                    with self._counts.harmless("strategy_failed"):
                        selected = bool(await finish(partial(select, job.call)))
                    self._counts.add("selected", int(selected))
                if selected:
                    await self._handle(job)
            self._jobs.task_done()


async def finish(function: Callable[[], Any], within: Replay | None = None) -> Any:
    """Run a function in a thread and await its result if necessary; tools act as in the run `within`."""
    context, replay = contextvars.copy_context(), within or Replay(())

    def act() -> Any:
        with in_context(replay):
            return function()

    async def await_in_context(awaited: Awaitable[Any]) -> Any:
        with in_context(replay):
            try:
                return await awaited
            except SystemExit as error:  # it would end the event loop with all other runs
                raise RuntimeError(repr(error)) from error

    result = await in_thread(lambda: context.run(act))
    if inspect.isawaitable(result):
        task = asyncio.get_running_loop().create_task(await_in_context(result), context=context)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
    return result


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run in a daemon thread; a cancelled caller waits for its end too."""
    future = in_daemon_thread(function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})  # a thread cannot be cancelled
        raise
