"""Runs the steps: rolls out, commits, waits for the version, and evaluates at intervals."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from tuneloop.runner.errors import TuneFailed
from tuneloop.runner.tuning.attempts import Attempts, Member, RewardOutbox
from tuneloop.runner.tuning.config import AlgorithmConfig, Call
from tuneloop.runner.tuning.experiment import Journal, JournalState, RunResult, TaskPlan
from tuneloop.runner.tuning.services import ServiceClient, TrainingWait
from tuneloop.runner.tuning.views import EvaluationReport, StepReport, View, interval_of

SAY_EVERY_S = 15.0  # seconds between two progress lines of an evaluation


class StepLoop:
    """Runs all steps that the journal lacks."""

    def __init__(
        self,
        plan: TaskPlan,
        call: Call,
        *,
        attempts: Attempts,
        services: Mapping[str, ServiceClient],
        journal: Journal,
        view: View,
    ) -> None:
        self._plan, self._call, self._attempts = plan, call, attempts
        self._services, self._journal, self._view = services, journal, view
        self._outbox = RewardOutbox(journal, services, view.say)
        self._trained = self._journal.state.first_step(self._plan)
        self._moved = asyncio.Condition()
        self._waits = {
            name: TrainingWait(each, view.say, step_s=call.step_timeout, trainer_s=call.service_timeout)
            for name, each in services.items()
        }

    async def run(self) -> None:
        """Raises TuneFailed."""
        total, first = self._plan.total_steps, self._journal.state.first_step(self._plan)
        # Deliver the journal's rewards again, and finish its committed steps.
        state = self._journal.state
        await self._outbox.send_again(list(state.unacknowledged.values()))
        unended = sorted(state.committed.keys() - state.steps.keys())
        for name, service in self._services.items():
            status = await service.status()
            if unended:
                await self._waits[name].until_served(status, settled=True)
            self._waits[name].served = max(self._waits[name].served, status.served)
        for step in unended:
            before = state.committing.get(step, {})
            published = any(each.served > before.get(name, {}).get("served", -1) for name, each in self._waits.items())
            await self._end_step(step, began=time.monotonic(), published=published)
        if first:
            self._view.say(f"resuming after step {first} of {self._plan.total_steps}")
        interval = (self._call.algorithm or AlgorithmConfig()).eval_interval_steps
        if first == 0 and self._call.evaluate_before:
            await self._evaluate(0)
        steps: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for step in range(first, total):
                await self._until_trained(step - self._call.max_staleness)
                if step and step % interval == 0:
                    await self._until_trained(step)
                    await self._evaluate(step)
                steps.append(group.create_task(self._step(step, after=steps[-1] if steps else None)))
        if self._call.evaluate_after:
            await self._evaluate(total)

    @property
    def _version(self) -> int:
        return max(each.served for each in self._waits.values())

    async def _until_trained(self, steps: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._trained >= steps)

    async def _step(self, step: int, *, after: "asyncio.Task[None] | None") -> None:
        began = time.monotonic()
        done = {(each.position, each.member): each for each in self._journal.state.results_of(step) if each.rewards}
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
        total, most, failures = len(members), self._call.max_failures, Counter[str]()

        async def make(member: Member) -> None:
            result = await self._attempts.run(member)
            await self._outbox.send(result)
            if result.failure is not None:
                failures[result.failure] += 1
                failed = failures.total()
                if failed > most * total or failed == total:
                    kinds = ", ".join(f"{count} x {kind}" for kind, count in failures.items())
                    raise TuneFailed(
                        f"step {step + 1}: {failed} of {total} runs failed ({kinds}); max_failures is {most:g}"
                    )
            self._view.run_ended(result)

        async with asyncio.TaskGroup() as group:
            for member in members:
                if (member.position, member.member) not in done:
                    group.create_task(make(member))
        if after is not None:
            await asyncio.wait({after})
        published = await self._train_on(step)
        await self._end_step(step, began=began, published=published)
        async with self._moved:
            self._trained = step + 1
            self._moved.notify_all()

    async def _end_step(self, step: int, *, began: float, published: bool) -> None:
        line = {"step": step, "version": self._version, "seconds": time.monotonic() - began, "published": published}
        await self._journal.append({"event": "step", **line})
        self._view.step(step_report(self._journal.state, step))

    async def _train_on(self, step: int) -> bool:
        """Commit the step and wait for the services; whether a new version is served.

        A repeated commit counts 0: the journal keeps the versions before the first commit, and the wait ignores the
        count.
        """
        before = {name: await service.status() for name, service in self._services.items()}
        known = self._journal.state.committing.get(step)
        if known is None:
            known = {name: {"newest": each.newest, "served": each.served} for name, each in before.items()}
            await self._journal.append({"event": "committing", "step": step, "before": known})
        tasks = [self._plan.task_id(position) for position in self._plan.positions(step)]
        committed = [await service.commit(tasks) for service in self._services.values()]
        line = {"event": "committed", "step": step, "tasks": len(tasks), "experiences": sum(committed)}
        await self._journal.append(line)
        published = [
            await self._waits[name].until_served(
                replace(status, newest=known[name]["newest"], served=known[name]["served"])
            )
            for name, status in before.items()
        ]
        if not any(published):
            why = "its rewards give no gradient" if any(committed) else "it has no rewarded experience"
            self._view.say(f"step {step + 1} made no new version: {why}")
        return any(published)

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

        results = await self._evaluate_all(members, step)
        rewards = [result.reward for result in results if result.reward is not None]
        found: defaultdict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, value in result.metrics.items():
                found[name].append(value)
        metrics = {name: fmean(values) for name, values in found.items()}
        failed = len(results) - len(rewards)
        if not rewards:
            raise TuneFailed(f"all {len(results)} runs of the evaluation failed")
        line: dict[str, Any] = {"step": step, "version": self._version, "rewards": rewards, "failed": failed}
        await self._journal.append({"event": "evaluated", **line, "metrics": metrics})
        report = evaluation_report(self._journal.state.evaluations[-1])
        self._view.evaluation(report, seconds=time.monotonic() - began)

    async def _evaluate_all(self, members: Sequence[Member], step: int) -> list[RunResult]:
        """All results in order, with a progress line at intervals."""
        done, say_at = 0, time.monotonic() + SAY_EVERY_S

        async def make(member: Member) -> RunResult:
            nonlocal done, say_at
            result = await self._attempts.run(member)
            done += 1
            if time.monotonic() >= say_at and done < len(members):
                say_at = time.monotonic() + SAY_EVERY_S
                self._view.say(f"evaluation at step {step}: {done} of {len(members)} runs")
            return result

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(make(member)) for member in members]
        return [each.result() for each in running]


def step_report(state: JournalState, step: int) -> StepReport:
    """Report of a step; the journal counts steps from 0, reports from 1."""
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
    return EvaluationReport(
        step=line["step"],
        version=line["version"],
        reward=interval_of(line["rewards"]),
        failed=line["failed"],
        metrics=line["metrics"],
    )
