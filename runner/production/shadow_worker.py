"""Runs shadow runs in a thread with an event loop of its own, tells their rewards and commits them."""

import asyncio
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.production.shadow_counts import ShadowCounts
from tuneloop.runner.production.shadow_runs import (
    RewardCalculator,
    ShadowJob,
    ShadowResult,
    ShadowRun,
    finish,
    in_thread,
    rehearse,
)
from tuneloop.runner.production.shadow_tools import ShadowTools
from tuneloop.runner.rewards.composite import Score

#: Seconds between two looks for what was offered.
_LOOK_S = 0.02

_SHARE_OF_STOP = 0.7  # of the time that a stop may take, for runs; the rest is for what they earned


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPlan:
    """How calls are run again, as TrainingRunner has it."""

    service: str
    model: str
    api_key: str
    reward_calculator: RewardCalculator
    repeat_time: int
    commit_interval_s: float
    concurrency: int
    queue_size: int
    timeout_s: float
    tools: ShadowTools


class ShadowWorker:
    """Takes jobs from any thread, at most `queue_size` at a time that wait."""

    def __init__(self, plan: ShadowPlan, counts: ShadowCounts, feedback: Feedback) -> None:
        self._plan, self._counts, self._feedback = plan, counts, feedback
        self._loop = asyncio.new_event_loop()
        self._offered: deque[ShadowJob] = deque()
        self._jobs: asyncio.Queue[ShadowJob] = asyncio.Queue()
        self._lock, self._waiting, self._accepting = threading.Lock(), 0, True
        self._uncommitted = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="tuneloop-training-runner", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it takes jobs. In a forked child it does not: the thread is the parent's."""
        return self._accepting and self._thread.is_alive()

    def offer(self, job: ShadowJob) -> None:
        """Take a job, or count that there is no room for it.

        The loop is not woken: that lets its thread run first, for milliseconds of the app's. It looks by itself.
        """
        with self._lock:
            if self._waiting >= self._plan.queue_size:
                self._counts.add("dropped_queue_full")
                return
            self._waiting += 1
        self._offered.append(job)

    def stop(self, timeout: float) -> bool:
        """Run what waits, tell and commit what it earned, and end; whether all of that was done in so many seconds."""
        deadline = time.monotonic() + timeout
        self._accepting = False
        done = False
        if self._thread.is_alive():
            draining = asyncio.run_coroutine_threadsafe(self._drain(timeout * _SHARE_OF_STOP), self._loop)
            try:
                done = draining.result(timeout)
            except TimeoutError:
                draining.cancel()  # an agent blocks the loop
        done = self._settle(deadline) and done
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _settle(self, deadline: float) -> bool:
        told = self._feedback.flush(max(0.0, deadline - time.monotonic()))
        committed = not told or self._commit()
        return self._feedback.close(max(0.0, deadline - time.monotonic())) and told and committed

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tasks = [self._loop.create_task(self._work()) for _ in range(self._plan.concurrency)]
        self._tasks.append(self._loop.create_task(self._look()))
        if self._plan.commit_interval_s > 0:
            self._tasks.append(self._loop.create_task(self._commit_now_and_then()))
        self._loop.run_forever()
        self._tasks += asyncio.all_tasks(self._loop)
        for task in self._tasks:
            task.cancel()
        for _ in range(3):  # as many as a cancelled task takes to end, unless it waits for a thread
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(close_connections())
        if all(task.done() for task in self._tasks):
            self._loop.close()

    async def _look(self) -> None:
        while True:
            self._take_offered()
            await asyncio.sleep(_LOOK_S)

    def _take_offered(self) -> None:
        while self._offered:
            self._jobs.put_nowait(self._offered.popleft())

    async def _drain(self, seconds: float) -> bool:
        self._take_offered()
        try:
            async with asyncio.timeout(seconds):
                await self._jobs.join()
        except TimeoutError:
            with self._lock:
                self._counts.add("dropped_at_stop", self._waiting)
            return False
        return True

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            with self._lock:
                self._waiting -= 1
            with self._counts.harmless("runner_failed"):
                await self._repeat(job)
            self._jobs.task_done()

    async def _repeat(self, job: ShadowJob) -> None:
        """The shadow runs of one call: one task, so that their rewards are compared."""
        if job.select is not None and not await self._select(job):
            return
        task_id = f"shadow-{uuid.uuid4()}"
        for number in range(self._plan.repeat_time):
            plan = self._plan
            run = ShadowRun(
                service=plan.service, task_id=task_id, run_id=str(number), api_key=plan.api_key, model=plan.model
            )
            self._counts.add("runs")
            result = await self._within_time("shadow", rehearse(job, run, plan.tools))
            if result is not None:
                self._counts.add("completed")
                await self._reward(result)

    async def _select(self, job: ShadowJob) -> bool:
        selected = False
        with self._counts.harmless("strategy_failed"):
            assert job.select is not None
            selected = bool(await finish(lambda: job.select and job.select(job.call)))
        self._counts.add("selected", int(selected))
        return selected

    async def _within_time(self, kind: str, work: Any) -> Any:
        """The result of some work, or None if it failed or took too long.

        What cannot be cancelled, such as a thread, holds its place among the runs until it ends: there are never more
        of them than that.
        """
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self._plan.timeout_s)
        if not done:
            late = TimeoutError(f"no end in {self._plan.timeout_s:g} s")
            self._counts.fail(f"{kind}_timed_out" if kind == "shadow" else f"{kind}_failed", late)
            task.cancel()
            await asyncio.wait({task})
            return None
        result = None
        with self._counts.harmless(f"{kind}_failed"):
            result = task.result()
        return result

    async def _reward(self, result: ShadowResult) -> None:
        async def calculate() -> tuple[Any]:
            return (await finish(lambda: self._plan.reward_calculator(result)),)

        if (calculated := await self._within_time("reward", calculate())) is None:
            return
        (reward,) = calculated
        if reward is None:
            self._counts.add("unrewarded")
            return
        with self._counts.harmless("feedback_failed"):
            await in_thread(lambda: self._tell(result, reward))
            self._counts.add("rewarded")
            self._uncommitted += 1

    def _tell(self, result: ShadowResult, reward: bool | float | Score) -> None:
        with self._feedback.batch() as many:
            if isinstance(reward, bool):
                many.thumb(result.run, reward)
            else:
                many.reward(result.run, reward)
            for label in dict.fromkeys(result.call.marks):
                many.label(result.run, label, metric=f"mark:{label}")

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._plan.commit_interval_s)
            await in_thread(self._commit)

    def _commit(self) -> bool:
        """Commit, if there is anything new; whether nothing is left to be committed."""
        if not (earned := self._uncommitted):
            return True
        with self._counts.harmless("commit_failed"):
            self._feedback.commit()
            self._counts.add("commits")
            self._uncommitted -= earned
            return True
        return False
