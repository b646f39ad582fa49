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
