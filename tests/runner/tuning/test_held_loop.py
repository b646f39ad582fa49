"""A judge or workflow that keeps the event loop is named, and costs others no time of theirs."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tests.runner.tuning.tuned import tuned
from tuneloop.runner import AlgorithmConfig, JudgeOutput, WorkflowOutput
from tuneloop.runner.tuning.attempts import call_within

TASKS = [{"question": f"{n}+1"} for n in range(4)]
STEPS = AlgorithmConfig(group_size=2, batch_size=2)


async def slow(task: Any, model: AsyncOpenAI) -> Any:
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    await asyncio.sleep(0.5)
    return WorkflowOutput(response="x")


async def judge_that_sleeps(task: Any, response: Any) -> Any:
    await asyncio.sleep(0)
    time.sleep(1.2)  # noqa: ASYNC251 - what is tested
    return JudgeOutput(reward=1.0)


@pytest.mark.contract
def test_a_judge_that_holds_the_loop_is_named_once_and_no_other_run_hangs_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tuned(
        ServiceDouble(), tmp_path, slow, TASKS, judge_func=judge_that_sleeps, algorithm=STEPS, run_timeout=2.0
    )
    assert result.failures == {}
    told = [line for line in capsys.readouterr().out.splitlines() if "held the event loop" in line]
    assert len(told) == 1
    assert "judge judge_that_sleeps held the event loop 1." in told[0]


def test_what_is_cancelled_raises_or_returns_at_once_is_as_without_the_watch() -> None:
    async def at_once() -> int:
        return 3

    async def raises() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def main() -> None:
        assert await call_within(5.0, at_once, {}, held.append) == 3
        with pytest.raises(KeyError):
            await call_within(5.0, raises, {}, held.append)
        with pytest.raises(TimeoutError):
            await call_within(0.3, cleans_up, {}, held.append)

    ended, held = list[bool](), list[float]()
    asyncio.run(main())
    assert (ended, held) == ([True], [])


def test_the_time_that_somebody_else_holds_the_loop_is_not_ours() -> None:
    async def holds() -> None:
        await asyncio.sleep(0.1)
        time.sleep(1.5)  # noqa: ASYNC251

    async def needs_a_second() -> bool:
        for _ in range(10):
            await asyncio.sleep(0.05)
        return True

    async def main() -> bool:
        held = list[float]()
        found, _ = await asyncio.gather(call_within(1.0, needs_a_second, {}), call_within(9.0, holds, {}, held.append))
        assert held == [pytest.approx(1.5, abs=0.7)]
        return bool(found)

    assert asyncio.run(main())
