"""Shadow runs: calls once more, by an agent whose model is the service's, in a thread with an event loop of its own."""

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

#: In the order in which a call comes by.
KINDS = (
    "calls",  # of wrapped functions
    "strategy_failed",
    "selected",
    "dropped_not_copied",  # their inputs cannot be copied
    "dropped_not_json",  # they cannot be written into the queue's folder
    "dropped_queue_full",
    "dropped_at_stop",
    "queued",  # written into the queue's folder
    "set_aside",  # files of the queue that are no calls, or were begun too often
    "runs",  # shadow runs that began
    "shadow_failed",
    "shadow_timed_out",
    "service_away",  # it failed to answer a run, whatever the agent made of that
    "completed",
    "reward_failed",
    "unrewarded",  # the calculator said None
    "feedback_failed",
    "rewarded",
    "commits",
    "commit_failed",
    "runner_failed",  # by a fault of ours
)

#: Seconds between two looks for what was offered.
_LOOK_S = 0.02

#: Of the time that a stop may take, the share for runs; the rest is for what they earned.
_SHARE_OF_STOP = 0.7

log = logging.getLogger("tuneloop.runner.shadow")


class ShadowCounts:
    """What became of calls and runs, by kind, from any thread; and the first traceback of each kind of failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._logged: set[str] = set()

    def add(self, kind: str, count: int = 1) -> None:
        """Count something of a kind."""
        with self._lock:
            self._counts[kind] += count

    def snapshot(self) -> dict[str, int]:
        """All of them, those too that are 0."""
        with self._lock:
            return dict(self._counts)

    def fail(self, kind: str, error: BaseException) -> None:
        """Count a failure; the first of its kind is logged with its traceback."""
        self.add(kind)
        with self._lock:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning("%s: %r; further ones are counted, not logged", kind, error, exc_info=error)

    @contextmanager
    def harmless(self, kind: str) -> Iterator[None]:
        """Count whatever the block raises, and go on behind it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the app must not feel what goes wrong here
            self.fail(kind, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRun(Run):
    """What a shadow agent is made with: a run, `base_url` and `api_key` bind any client to it, and the model's name.

    `tools` are the app's, bound to it: in whatever thread they are called, they write nothing.
    """

    model: str
    tools: RunTools = field(default_factory=lambda: RunTools({}, Replay(())), compare=False, repr=False)

    def chat_model(self, client: ClientKind = "auto", **defaults: Any) -> Any:
        """An AgentScope chat model, or an AsyncOpenAI client without AgentScope; `defaults` are sampling parameters."""
        return make_model(self, CallDefaults(model_name=self.model, **defaults), client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowResult:
    """What a reward is calculated of: what the shadow agent answered, beside what production was asked and did."""

    run: ShadowRun
    call: ProductionCall
    result: Any
    tool_calls: tuple[ShadowToolCall, ...]

    @property
    def production_result(self) -> Any:
        """What the user got."""
        return self.call.result


#: Makes the agent of a shadow run: what it returns is called as production was.
AgentFactory = Callable[[ShadowRun], Callable[..., Any]]

#: The reward: a number, a thumb, or a Score, whose components are sent too. None: there is no reward.
Reward = float | bool | Score | None
RewardCalculator = Callable[[ShadowResult], Reward | Awaitable[Reward]]


@dataclass(slots=True, kw_only=True)
class ShadowJob:
    """A production call that was answered, in an event `loop` or in none. `select`, if any, is still to be asked."""

    call: ProductionCall
    recorded: tuple[RecordedToolCall, ...]
    agent: AgentFactory | None = None
    select: Callable[[ProductionCall], bool] | None = None
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(slots=True, kw_only=True)
class ShadowExecutor:
    """Makes the shadow runs of calls, each for at most `timeout_s`, sends their rewards, and commits them."""

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
        """The shadow runs of one call: one task, so that their rewards are compared."""
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

            def tell(run: ShadowRun = run, reward: bool | float | Score = reward) -> None:
                with self.feedback.batch() as many:
                    if isinstance(reward, bool):
                        many.thumb(run, reward)
                    else:
                        many.reward(run, reward)
                    for label in dict.fromkeys(job.call.marks):
                        many.label(run, label, metric=f"mark:{label}")

            with self.counts.harmless("feedback_failed"):
                await in_thread(tell)
                self.counts.add("rewarded")
                self.to_commit = True

    async def _reward_of(self, job: ShadowJob, run: ShadowRun, replay: Replay) -> Reward:
        assert job.agent is not None
        make = job.agent

        def act() -> Any:
            # Of their own for each run: agents change what they are given.
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
        """The result of some work, or None if it failed or took too long.

        What cannot be cancelled, such as a thread, holds its place among the runs until it ends: there are never more
        of them than that.
        """
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        if not done:
            late = TimeoutError(f"no end in {self.timeout_s:g} s")
            self.counts.fail(f"{kind}_timed_out" if kind == "shadow" else f"{kind}_failed", late)
            task.cancel()
            await asyncio.wait({task})
            return None
        try:
            return (task.result(),)
        except Exception as error:  # noqa: BLE001 - the app must not feel what goes wrong here
            self.counts.fail(f"{kind}_failed", error)
            return None

    def commit(self) -> bool:
        """Commit, if there is anything new; whether nothing is left to be committed."""
        if not self.to_commit:
            return True
        self.to_commit = False
        try:
            self.feedback.commit()
        except Exception as error:  # noqa: BLE001 - the app must not feel what goes wrong here
            self.to_commit = True
            self.counts.fail("commit_failed", error)
            return False
        self.counts.add("commits")
        return True

    def settle(self, timeout: float) -> bool:
        """Send and commit what the runs earned, and end; whether all of that was done in so many seconds."""
        deadline = time.monotonic() + timeout
        told = self.feedback.flush(max(0.0, timeout))
        committed = not told or self.commit()
        return self.feedback.close(max(0.0, deadline - time.monotonic())) and told and committed


class ShadowWorker:
    """A thread with an event loop, which handles jobs, at most `concurrency` at once, and commits now and then."""

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
        """Whether it takes jobs. In a forked child it does not: the thread is the parent's."""
        return self._accepting and self._thread.is_alive()

    def offer(self, job: ShadowJob) -> None:
        """Take a job, or count that there is no room. The loop is not woken, which would hold up the app; it looks."""
        with self._lock:
            if self._waiting >= self._queue_size:
                self._counts.add("dropped_queue_full")
                return
            self._waiting += 1
        self._offered.append(job)

    def stop(self, timeout: float) -> bool:
        """Handle what waits, for a part of the time, and end; whether all of it was handled."""
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

        async def commit_now_and_then() -> None:
            while self._commit_interval_s > 0:
                await asyncio.sleep(self._commit_interval_s)
                await in_thread(self._commit)

        tasks = {self._loop.create_task(self._work()) for _ in range(self._concurrency)}
        tasks |= {self._loop.create_task(each) for each in (look(), commit_now_and_then())}
        self._loop.run_forever()
        tasks |= asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        for _ in range(3):  # as many as a cancelled task takes to end, unless it waits for a thread
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
    """The result of a function, run in a thread, and awaited here if need be; its tools do as in the run `within`."""
    context, replay = contextvars.copy_context(), within or Replay(())

    def act() -> Any:
        with in_context(replay):
            return function()

    async def go_on(awaited: Awaitable[Any]) -> Any:
        with in_context(replay):
            try:
                return await awaited
            except SystemExit as error:  # which would end the event loop, and all other runs with it
                raise RuntimeError(repr(error)) from error

    result = await in_thread(lambda: context.run(act))
    if inspect.isawaitable(result):
        task = asyncio.get_running_loop().create_task(go_on(result), context=context)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
    return result


async def in_thread(function: Callable[[], Any]) -> Any:
    """The result of a function in a daemon thread, of which also who is cancelled waits for the end."""
    future = in_daemon_thread(function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})  # a thread cannot be cancelled
        raise
