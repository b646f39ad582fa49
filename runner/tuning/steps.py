"""The loop: roll out a step, commit it, wait for the version made of it, evaluate now and then."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuneloop.runner.errors import TuneFailed
from tuneloop.runner.tuning.journal import Journal, JournalState, RunResult
from tuneloop.runner.tuning.plan import TaskPlan
from tuneloop.runner.tuning.rollouts.attempts import Attempts, Member
from tuneloop.runner.tuning.rollouts.reward_outbox import RewardOutbox
from tuneloop.runner.tuning.services.service_client import ServiceClient, TrainingStatus
from tuneloop.runner.tuning.summary import EvaluationReport, StepReport, interval_of
from tuneloop.runner.tuning.views.view import View

#: Seconds between two looks at what the services are doing.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far rollouts may run ahead, and when it is evaluated, and stopped.

    `max_staleness`: steps whose rollouts may have begun before the version of an earlier one is served; 0 is on-policy.
    `max_failures`: the share of a step's runs that may fail. `patience_s`: how long a step may make no progress.
    """

    concurrency: int = 64
    max_staleness: int = 0
    max_failures: float = 0.5
    evaluation_interval: int = 100
    evaluate_before: bool = True
    evaluate_after: bool = True
    patience_s: float = 3600.0


class StepLoop:
    """All steps of an experiment, those that the journal has left out."""

    def __init__(
        self,
        plan: TaskPlan,
        pace: Pace,
        *,
        attempts: Attempts,
        services: Mapping[str, ServiceClient],
        journal: Journal,
        view: View,
    ) -> None:
        self._plan, self._pace, self._attempts = plan, pace, attempts
        self._services, self._journal, self._view = services, journal, view
        self._outbox = RewardOutbox(journal, services)
        self._room = asyncio.Semaphore(pace.concurrency)
        self._absorbed = self._first_step()
        self._moved = asyncio.Condition()
        self._expected: dict[str, int] = {}
        self._version = 0

    async def run(self) -> None:
        """Make all steps. Raises TuneFailed."""
        total, first = self._plan.total_steps, self._first_step()
        await self._take_up(first)
        if first == 0 and self._pace.evaluate_before:
            await self._evaluate(0)
        steps: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for step in range(first, total):
                await self._until_absorbed(step - self._pace.max_staleness)
                if step and step % self._pace.evaluation_interval == 0:
                    await self._until_absorbed(step)
                    await self._evaluate(step)
                steps.append(group.create_task(self._step(step, after=steps[-1] if steps else None)))
        if self._pace.evaluate_after:
            await self._evaluate(total)

    async def _take_up(self, first: int) -> None:
        """Go on where the journal ends: with rewards that may not have been given, and a step that may not be made."""
        state = self._journal.state
        await self._outbox.send_again(list(state.unacknowledged.values()))
        for name, service in self._services.items():
            status = await service.status()
            if state.committed - state.steps.keys():
                await self._until_served(name, status, settled=True)
            self._version = max(self._version, status.served)
        for step in sorted(state.committed - state.steps.keys()):
            await self._end_step(step, began=time.monotonic(), published=True)
        if first:
            self._view.say(f"going on after step {first} of {self._plan.total_steps}")

    def _first_step(self) -> int:
        committed = self._journal.state.committed
        return next(step for step in range(self._plan.total_steps + 1) if step not in committed)

    async def _until_absorbed(self, steps: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._absorbed >= steps)

    # One step.

    async def _step(self, step: int, *, after: "asyncio.Task[None] | None") -> None:
        began = time.monotonic()
        await self._roll_out(step)
        if after is not None:
            await asyncio.wait({after})
        published = await self._train_on(step)
        await self._end_step(step, began=began, published=published)
        async with self._moved:
            self._absorbed = step + 1
            self._moved.notify_all()

    async def _end_step(self, step: int, *, began: float, published: bool) -> None:
        line = {"step": step, "version": self._version, "seconds": time.monotonic() - began, "published": published}
        await self._journal.append({"event": "step", **line})
        self._view.step(step_report(self._journal.state, step))

    async def _roll_out(self, step: int) -> None:
        done = {(result.position, result.member): result for result in self._journal.state.results_of(step)}
        members = [
            Member(
                step=step,
                position=position,
                member=member,
                task=self._plan.task(position),
                task_id=self._plan.task_id(position),
            )
            for position in self._plan.positions(step)
            for member in range(self._plan.group_size)
        ]
        failures = _FailureCount(len(members), self._pace.max_failures, step + 1)
        for result in done.values():
            failures.add(result)

        async def make(member: Member) -> None:
            async with self._room:
                result = await self._attempts.run(member)
            await self._outbox.send(result)
            failures.add(result)
            self._view.run_ended(result)

        async with asyncio.TaskGroup() as group:
            for member in members:
                if (member.position, member.member) not in done:
                    group.create_task(make(member))

    async def _train_on(self, step: int) -> bool:
        """Commit the step and wait until the services have made of it what they make; whether that is a version."""
        before = {name: await service.status() for name, service in self._services.items()}
        tasks = [self._plan.task_id(position) for position in self._plan.positions(step)]
        committed = {name: await service.commit(tasks) for name, service in self._services.items()}
        await self._journal.append({"event": "committed", "step": step, "experiences": sum(committed.values())})
        published = [await self._until_served(name, before[name]) for name, count in committed.items() if count]
        if not any(published):
            why = (
                "nothing of it could be committed" if not any(committed.values()) else "nothing in it was to be learnt"
            )
            self._view.say(f"step {step + 1} made no new version: {why}")
        return any(published)

    async def _until_served(self, name: str, before: TrainingStatus, *, settled: bool = False) -> bool:
        """Wait for the version of what was committed last; False if none came of it. `settled`: for all there is."""
        expected = self._expected[name] = max(self._expected.get(name, 0), before.newest) + 1
        since, last = time.monotonic(), before
        while True:
            status = await self._services[name].status()
            if (status.served >= expected and not settled) or status.settled:
                self._expected[name] = max(status.served, before.newest)
                self._version = max(self._version, status.served)
                return status.served > before.served
            if (status.newest, status.served, status.states) != (last.newest, last.served, last.states):
                since, last = time.monotonic(), status
            if time.monotonic() - since > self._pace.patience_s:
                why = "; ".join(status.sentences)
                raise TuneFailed(
                    f"the service at {self._services[name].url} has made nothing for "
                    f"{self._pace.patience_s:g} s of what was committed: {why}"
                )
            await asyncio.sleep(_LOOK_S)

    # Evaluation.

    async def _evaluate(self, step: int) -> None:
        if not self._plan.evaluation or any(each["step"] == step for each in self._journal.state.evaluations):
            return
        began = time.monotonic()
        members = [
            Member(
                step=step,
                position=position,
                member=0,
                task=task,
                task_id=f"{self._plan.name}:evaluation:{step}:{position}",
                train=False,
            )
            for position, task in enumerate(self._plan.evaluation)
        ]

        async def make(member: Member) -> RunResult:
            async with self._room:
                return await self._attempts.run(member)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(make(member)) for member in members]
        results = [each.result() for each in running]
        rewards = [result.reward for result in results if result.reward is not None]
        metrics = _means([result.metrics for result in results])
        failed = len(results) - len(rewards)
        if not rewards:
            raise TuneFailed(f"all {len(results)} runs of the evaluation failed")
        line: dict[str, Any] = {"step": step, "version": self._version, "rewards": rewards, "failed": failed}
        await self._journal.append({"event": "evaluated", **line, "metrics": metrics})
        report = evaluation_report(self._journal.state.evaluations[-1])
        self._view.evaluation(report, seconds=time.monotonic() - began)


class _FailureCount:
    """Counts a step's failures; raises as soon as they are too many."""

    def __init__(self, total: int, most: float, step: int) -> None:
        self._total, self._most, self._step = total, most, step
        self._kinds: dict[str, int] = {}

    def add(self, result: RunResult) -> None:
        """Count a run. Raises TuneFailed."""
        if result.failure is None:
            return
        self._kinds[result.failure] = self._kinds.get(result.failure, 0) + 1
        failed = sum(self._kinds.values())
        if failed > self._most * self._total or failed == self._total:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self._kinds.items())
            raise TuneFailed(
                f"step {self._step}: {failed} of {self._total} runs failed ({kinds}); max_failures is {self._most:g}"
            )


def step_report(state: JournalState, step: int) -> StepReport:
    """What the journal says of a step; steps count from 0, a report's from 1."""
    results, line = state.results_of(step), state.steps[step]
    rewards = [result.reward for result in results if result.reward is not None]
    return StepReport(
        step=step + 1,
        reward=interval_of(rewards) if rewards else None,
        runs=len(results),
        failed=len(results) - len(rewards),
        seconds=line["seconds"],
        version=line["version"],
        published=line["published"],
        tokens=sum(result.tokens for result in results),
    )


def evaluation_report(line: Mapping[str, Any]) -> EvaluationReport:
    """What a line of the journal says of an evaluation."""
    return EvaluationReport(
        step=line["step"],
        version=line["version"],
        reward=interval_of(line["rewards"]),
        failed=line["failed"],
        metrics=line["metrics"],
    )


def _means(metrics: list[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for each in metrics:
        for name, value in each.items():
            sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}
