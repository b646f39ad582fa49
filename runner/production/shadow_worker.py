"""Runs shadow runs in a thread with an event loop of its own, tells their rewards and commits them."""

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tuneloop.runner.feedback.feedback_client import Feedback
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.production.isolation.app_pipe import CannotSend
from tuneloop.runner.production.isolation.remote_runs import RemoteRuns
from tuneloop.runner.production.shadow_counts import ShadowCounts, log
from tuneloop.runner.production.shadow_runs import (
    AgentFactory,
    Rehearsals,
    Reward,
    RewardCalculator,
    ShadowJob,
    ShadowRun,
    finish,
    in_thread,
)
from tuneloop.runner.production.shadow_tools import Replay, ShadowTools
from tuneloop.runner.production.short_turns import short_turns
from tuneloop.runner.rewards.composite import Score

#: Seconds between two looks for what was offered.
_LOOK_S = 0.02

#: Where shadow runs compute: away from the app's interpreter lock if they can be sent there, always there, or never.
RunIn = Literal["auto", "process", "thread"]

_SHARE_OF_STOP = 0.7  # of the time that a stop may take, for runs; the rest is for what they earned


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPlan:
    """How calls are run again, as TrainingRunner has it."""

    service: str
    model: str
    api_key: str
    agent: AgentFactory
    reward_calculator: RewardCalculator
    repeat_time: int
    commit_interval_s: float
    concurrency: int
    queue_size: int
    timeout_s: float
    tools: ShadowTools
    run_in: RunIn


class ShadowWorker:
    """Takes jobs from any thread, at most `queue_size` at a time that wait."""

    def __init__(self, plan: ShadowPlan, counts: ShadowCounts, feedback: Feedback) -> None:
        """Raises CannotSend where the runs are to be in a process of their own, and cannot be."""
        self._plan, self._counts, self._feedback = plan, counts, feedback
        self._here = Rehearsals(reward_calculator=plan.reward_calculator, timeout_s=plan.timeout_s, counts=counts)
        self._noted = False
        self._remote = None if plan.run_in == "thread" else self._open_process()
        self._loop = asyncio.new_event_loop()
        self._offered: deque[ShadowJob] = deque()
        self._jobs: asyncio.Queue[ShadowJob] = asyncio.Queue()
        self._lock, self._waiting, self._accepting = threading.Lock(), 0, True
        self._uncommitted = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="tuneloop-training-runner", daemon=True)
        self._thread.start()

    def _open_process(self) -> RemoteRuns | None:
        plan = self._plan
        try:
            return RemoteRuns(
                plan.agent, plan.reward_calculator, plan.tools, timeout_s=plan.timeout_s, counts=self._counts
            )
        except CannotSend as error:
            if plan.run_in == "process":
                raise
            self._note_in_app(error)
            return None

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
        if self._remote is not None:
            self._remote.close()
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
            if (rewarded := await self._make(job, run)) is not None:
                await self._reward(run, job, *rewarded)

    async def _make(self, job: ShadowJob, run: ShadowRun) -> tuple[Reward] | None:
        if self._remote is not None:
            try:
                return await self._remote.make(job, run)
            except CannotSend as error:
                if self._plan.run_in == "process":
                    self._counts.fail("shadow_failed", error)
                    return None
                self._note_in_app(error)
        self._counts.add("runs_in_app")
        replay = Replay(job.recorded, job.loop)
        with short_turns():
            return await self._here.make(
                job.agent, job.call, replace(run, tools=self._plan.tools.bound_to(replay)), replay
            )

    def _note_in_app(self, error: CannotSend) -> None:
        if not self._noted:
            self._noted = True
            log.warning("shadow runs compute in the app's own process, under its interpreter lock: %s", error)

    async def _select(self, job: ShadowJob) -> bool:
        selected = False
        with self._counts.harmless("strategy_failed"):
            assert job.select is not None
            selected = bool(await finish(lambda: job.select and job.select(job.call)))
        self._counts.add("selected", int(selected))
        return selected

    async def _reward(self, run: ShadowRun, job: ShadowJob, reward: Reward) -> None:
        if reward is None:
            self._counts.add("unrewarded")
            return
        with self._counts.harmless("feedback_failed"):
            await in_thread(lambda: self._tell(run, job.call.marks, reward))
            self._counts.add("rewarded")
            with self._lock:
                self._uncommitted += 1

    def _tell(self, run: ShadowRun, marks: Sequence[str], reward: bool | float | Score) -> None:
        with self._feedback.batch() as many:
            if isinstance(reward, bool):
                many.thumb(run, reward)
            else:
                many.reward(run, reward)
            for label in dict.fromkeys(marks):
                many.label(run, label, metric=f"mark:{label}")

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
            with self._lock:
                self._uncommitted -= earned
            return True
        return False
