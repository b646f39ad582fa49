"""Tries candidates for the gate on an engine out of rotation; the champion once, beside what clients ask."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.explorer.feedback.judge import judge_of as model_judge_of
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions.loading import Verifier, is_away, load, verify_wanted
from tuneloop.explorer.versions.reload import Gate, Reloader
from tuneloop.runner.errors import JudgeAway, JudgeFailed
from tuneloop.runner.rewards.reply import Reply
from tuneloop.shared.errors import (
    CheckpointRejected,
    EngineError,
    EnvironmentRefused,
    LedgerUnavailable,
    NotEvaluated,
    TuneloopError,
)
from tuneloop.shared.evaluation.scores import EvaluationProgress, Figure, TaskReply, figures_of
from tuneloop.shared.evaluation.tasks import Task, fingerprint, judge_of, without_reasoning
from tuneloop.shared.experience import VersionAction
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

#: Questions at once: to an engine without other requests, and to one that answers clients.
_APART, _BESIDE = 8, 2

#: How often a candidate may take the engine down that it is tried on.
_DEATHS = 2

AGAIN_S = 60.0

Judge = Callable[[Task, str], Awaitable[float | None]]


@asynccontextmanager
async def judging(settings: Settings) -> AsyncIterator[Judge]:
    """How replies are judged, for one evaluation. Raises EnvironmentRefused if who judges is not there."""
    known = judge_of(settings.monitor.evaluation)
    if known is not None:
        judge = known

        async def by_itself(task: Task, reply: str) -> float | None:
            return await asyncio.to_thread(judge, task, reply)

        yield by_itself
        return
    if settings.judge.url is None:
        raise EnvironmentRefused("monitor.evaluation.judge: model needs judge.url and judge.model: which model judges")
    model = model_judge_of(settings.judge)

    async def by_model(task: Task, reply: str) -> float | None:
        candidate = Reply(text=without_reasoning(reply), messages=tuple(task.messages), expected=task.answer)
        try:
            return (await model.score_async(candidate)).normalised
        except JudgeFailed:
            return None
        except JudgeAway as error:
            raise NotEvaluated(f"the judge is away: {error.reason}") from None

    try:
        yield by_model
    finally:
        await model.close_async()


class CandidateEvaluation:
    """Evaluates what waits at the gate, where there is an engine to spare. Raises EnvironmentRefused as Gate does."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        *,
        ledger: Ledger,
        metrics: Metrics,
        reloader: Reloader,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._ledger = ledger
        self._reloader = reloader
        self._gate = reloader.gate
        self._verifier = Verifier.of(settings)
        self._metrics = metrics
        self._not_before: dict[int, float] = {}
        self._deaths: Counter[int] = Counter()

    async def run(self) -> None:
        """Look for a candidate every `service_status_check_interval` seconds, if engines evaluate at all."""
        if self._gate.on_engine:
            seconds = self._settings.explorer.service_status_check_interval
            await every(seconds, self.turn, task="evaluation", metrics=self._metrics)

    async def turn(self) -> None:
        champion = await asyncio.to_thread(
            self._ledger.versions.champion
        )  # First: what is promoted meanwhile is no candidate.
        candidate = await asyncio.to_thread(self._ledger.versions.candidate)
        busy = self._fleet.split is not None or await asyncio.to_thread(self._ledger.versions.canary) is not None
        if candidate is None or busy or time.monotonic() < self._not_before.get(candidate.version, 0.0):
            return
        if await self._gate.verdict(candidate, champion) is not None:
            return
        try:
            await self._evaluate(candidate, champion)
        except (NotEvaluated, EnvironmentRefused) as error:
            self._gate.give_up(candidate, str(error))
            self._not_before[candidate.version] = time.monotonic() + AGAIN_S

    async def _evaluate(self, candidate: Version, champion: Version) -> None:
        started = time.monotonic()
        async with judging(self._settings) as judge:
            await self._record_champion(champion, judge)
            figures = await self._try(candidate, champion, judge)
        if figures is None:
            return
        verdict = await self._gate.decide(figures, champion)
        assert verdict is not None
        reason = verdict.reason(champion.version)
        details = verdict.details(champion.version)
        note = self._ledger.versions.note
        await asyncio.to_thread(
            note, candidate.version, VersionAction.EVALUATED, by="explorer", reason=reason, details=details
        )
        # Only now: with them in the ledger the version may be rejected, or served, at once.
        await self._gate.record(candidate.version, figures)
        seconds = round(time.monotonic() - started, 3)
        log.info("version_evaluated", version=candidate.version, passed=verdict.passed, reason=reason, seconds=seconds)

    async def _record_champion(self, champion: Version, judge: Judge) -> None:
        if await self._gate.figures(champion.version):
            return
        engine = self._one_of(champion)
        if engine is None:
            raise NotEvaluated(f"no engine is ready with version {champion.version}, to compare it with")
        swaps = engine.swaps
        try:
            figures = await self._figures(engine, judge, _BESIDE)
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise NotEvaluated(f"engine {engine.number} cannot be asked: {error!r}") from error
        if engine.swaps != swaps:
            raise NotEvaluated(f"engine {engine.number} was given other weights meanwhile")
        await self._gate.record(champion.version, figures)

    async def _try(self, candidate: Version, champion: Version, judge: Judge) -> tuple[Figure, ...] | None:
        """The candidate's figures; None if it was rejected on the way."""
        engine = await self._take_out(champion)
        swaps = engine.swaps
        try:
            return await self._evaluate_on(engine, candidate, judge)
        except (CheckpointRejected, EngineError) as error:
            reason = str(error)
            if await is_away(candidate, self._verifier, self._ledger, error):
                raise NotEvaluated(reason) from error
            if isinstance(error, EngineError):
                self._deaths[candidate.version] += 1
                # One that was started with the candidate is started once more for the champion: that is enough.
                if self._deaths[candidate.version] < (1 if engine.restarts else _DEATHS):
                    raise NotEvaluated(f"engine {engine.number}: {error}") from error
                reason = f"engines die of it: {error}"
            await self._gate.reject(candidate, reason)
            return None
        finally:
            await self._put_back(engine, champion, untouched=engine.swaps == swaps)

    async def _take_out(self, champion: Version) -> Engine:
        """An engine taken out of rotation, with nothing in flight. At least one other stays in it."""
        async with self._reloader.swapping:
            engine = self._one_of(champion)
            others = [each for each in self._fleet.engines if each.state is EngineState.READY and each is not engine]
            if engine is None or not others:
                raise NotEvaluated("no engine can be spared")
            await self._fleet.set_state(engine, EngineState.RELOADING)
        try:
            await asyncio.wait_for(self._fleet.wait_until_idle(engine), self._settings.explorer.request_timeout)
        except TimeoutError:
            await self._put_back(engine, champion, untouched=True)
            raise NotEvaluated(f"engine {engine.number} does not come to an end with what it has in flight") from None
        return engine

    async def _evaluate_on(self, engine: Engine, candidate: Version, judge: Judge) -> tuple[Figure, ...]:
        probe = await verify_wanted(candidate, self._verifier, self._ledger)
        async with self._reloader.swapping:
            await load(engine, candidate, fleet=self._fleet)
            await engine.control.prove(probe)
        swaps = engine.swaps
        try:
            figures = await self._figures(engine, judge, _APART)
        except (LookupError, TypeError, ValueError) as error:
            raise NotEvaluated(f"the engine's answer cannot be read: {error!r}") from error
        if engine.swaps != swaps or engine.state is not EngineState.RELOADING:
            raise NotEvaluated(f"engine {engine.number} was given other weights meanwhile")
        return figures

    async def _put_back(self, engine: Engine, champion: Version, *, untouched: bool) -> None:
        """Put the engine into rotation with the champion; one that is still `untouched` needs no new start for that."""
        async with self._reloader.swapping:
            with suppress(LedgerUnavailable):  # If there is another by now, the reloader sees to it.
                champion = await asyncio.to_thread(self._ledger.versions.champion)
            if engine.state is EngineState.RELOADING and engine.restarts and untouched:
                await self._fleet.set_state(engine, EngineState.READY)
            elif engine.state is EngineState.RELOADING:
                await self._reloader.put_back(engine, champion)

    async def _figures(self, engine: Engine, judge: Judge, at_once: int) -> tuple[Figure, ...]:
        return await figures_from(engine.control, self._settings, self._gate.tasks, judge, at_once=at_once)

    def _one_of(self, version: Version) -> Engine | None:
        """The ready engine of the version with the least in flight; of several the last, which is shared least."""
        ready = [
            each
            for each in reversed(self._fleet.engines)
            if each.state is EngineState.READY and each.version == version.version
        ]
        return min(ready, key=lambda engine: engine.in_flight, default=None)


async def evaluate_beside(
    gate: Gate,
    settings: Settings,
    candidate: Version,
    champion: Version,
    *,
    ledger: Ledger,
    control_of: Callable[[Version], Awaitable[EngineControl]],
) -> None:
    """Evaluate a policy's candidate, and its champion once, on an engine that has both. Raises NotEvaluated."""
    async with judging(settings) as judge:
        for version in (champion, candidate):
            if await gate.figures(version.version):
                continue
            control = await control_of(version)
            try:
                figures = await figures_from(control, settings, gate.tasks, judge, at_once=_BESIDE)
            except (EngineError, LookupError, TypeError, ValueError) as error:
                raise NotEvaluated(f"version {version.version} cannot be asked: {error!r}") from error
            verdict = await gate.decide(figures, champion) if version is candidate else None
            if verdict is not None:
                reason, details = verdict.reason(champion.version), verdict.details(champion.version)
                note = partial(ledger.versions.note, by="explorer", reason=reason, details=details)
                await asyncio.to_thread(note, candidate.version, VersionAction.EVALUATED)
            await gate.record(version.version, figures)


async def figures_from(
    control: EngineControl, settings: Settings, tasks: Sequence[Task], judge: Judge, *, at_once: int
) -> tuple[Figure, ...]:
    """From greedy replies, past the proxy: none is recorded. Where one fails, the others are not waited for."""
    places, progress = asyncio.Semaphore(at_once), EvaluationProgress(len(tasks))
    # Our own questions after those of clients, if the engine schedules by priority.
    args = settings.explorer.rollout_model.engine_args
    heeds = "--scheduling-policy=priority" in args or ("--scheduling-policy", "priority") in pairwise(args)
    last: dict[str, object] = {"priority": 1} if heeds else {}
    how: dict[str, object] = {"temperature": 0.0, "max_tokens": settings.monitor.evaluation.most_tokens} | last

    async def answer(task: Task) -> TaskReply:
        async with places:
            if isinstance(task.question, str):
                completion = await control.query("/v1/completions", prompt=task.question, **how)
            else:
                completion = await control.query("/v1/chat/completions", messages=task.question, **how)
            choice, usage = completion["choices"][0], completion["usage"]
            reply = (choice["text"] if "text" in choice else choice["message"]["content"]) or ""
            whole = choice["finish_reason"] != "length"
            answered = TaskReply(task, reply, usage["completion_tokens"], await judge(task, reply), whole)
        progress.add()
        return answered

    try:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(answer(each)) for each in tasks]
    except* (TuneloopError, LookupError, TypeError, ValueError) as errors:
        raise errors.exceptions[0] from None
    answered = [each.result() for each in answers]
    judged = fingerprint(tasks, settings.monitor.evaluation, settings.judge)
    return figures_of(answered, fingerprint=judged, refusals=settings.monitor.drift.refusals_found)
