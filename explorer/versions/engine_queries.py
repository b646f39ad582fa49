"""Asks an engine questions of ours, past the proxy: nobody records them, so they never become training data."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.engines.vllm import EngineControl, priority_of
from tuneloop.explorer.feedback.judge import judge_of as model_judge_of
from tuneloop.runner.errors import JudgeAway, JudgeFailed
from tuneloop.runner.rewards.reply import Reply
from tuneloop.shared.errors import EnvironmentRefused, NotEvaluated, TuneloopError
from tuneloop.shared.evaluation.evaluation_log import EvaluationProgress
from tuneloop.shared.evaluation.scores import TaskReply
from tuneloop.shared.evaluation.tasks import Task, judge_of, without_reasoning
from tuneloop.shared.settings.settings import Settings

_T = TypeVar("_T")
_R = TypeVar("_R")

Judge = Callable[[Task, str], Awaitable[float | None]]


class EngineQueries:
    """Asks the tasks, `at_once` at a time. Raises EngineError if the engine does not answer."""

    def __init__(self, settings: Settings, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._most_tokens = settings.monitor.evaluation.most_tokens
        self._priority = priority_of(settings)

    async def answers(self, engine: Engine, judge: Judge, *, at_once: int) -> list[TaskReply]:
        """Greedy replies and their scores. Raises NotEvaluated if the judge cannot say."""

        async def one(task: Task) -> TaskReply:
            completion = await self._query(engine.control, task, temperature=0.0)
            choice, usage = completion["choices"][0], completion["usage"]
            reply = (choice["text"] if "text" in choice else choice["message"]["content"]) or ""
            whole = choice["finish_reason"] != "length"
            return TaskReply(task, reply, usage["completion_tokens"], await judge(task, reply), whole)

        return await _each(one, self._tasks, at_once)

    async def _query(self, control: EngineControl, task: Task, **how: Any) -> dict[str, Any]:
        how |= {"max_tokens": self._most_tokens, **self._priority}
        if isinstance(task.question, str):
            return await control.query("/v1/completions", prompt=task.question, **how)
        return await control.query("/v1/chat/completions", messages=task.question, **how)


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


async def _each(ask: Callable[[_T], Awaitable[_R]], items: Sequence[_T], at_once: int) -> list[_R]:
    """All answers, in order; where one raises, the others are not waited for."""
    places, progress = asyncio.Semaphore(at_once), EvaluationProgress(len(items))

    async def run_one(each: _T) -> _R:
        async with places:
            answer = await ask(each)
        progress.add()
        return answer

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(each)) for each in items]
    except* (TuneloopError, LookupError, TypeError, ValueError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
