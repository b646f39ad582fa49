"""A workflow that catches everything: what its service failed to answer is never taught as a bad reward."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.runner.faulty_service import FAILURES, Failure, FaultyService, ask
from tests.runner.tuning.service_double import MODEL
from tests.runner.tuning.tuned import tuned
from tuneloop.runner import WorkflowOutput

TASKS = [{"question": f"{n}+1"} for n in range(8)]
BAD = {"3+1", "7+1"}


def catching(*, stream: bool = False, retries: int = 0) -> Any:
    """A workflow that asks an easy question first, and rewards whatever goes wrong with -0.1."""

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        try:
            await ask("0+1", model, stream=False)
            await ask(task["question"], model, stream=stream, retries=retries)
        except Exception:  # noqa: BLE001 - as users' workflows do
            return WorkflowOutput(reward=-0.1)
        return WorkflowOutput(reward=1.0)

    return workflow


@pytest.mark.contract
@pytest.mark.parametrize("failure", FAILURES)
def test_a_run_whose_service_did_not_answer_is_not_rewarded_whatever_the_workflow_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: Failure
) -> None:
    double = FaultyService(fails=lambda question, before: failure if question in BAD else None)
    result = tuned(double, tmp_path, catching(stream=failure in {"cut stream", "error event"}), TASKS)
    assert result.failures == {"service away": 4}
    assert [(each.runs, each.failed) for each in result.history] == [(8, 2), (8, 2)]
    assert sorted(double.rewards.values()) == [1.0] * 12
    assert "failed: 4 x service away" in capsys.readouterr().out


@pytest.mark.contract
@pytest.mark.parametrize("failure", FAILURES)
def test_such_a_run_is_repeated_and_rewarded_when_its_service_answers(tmp_path: Path, failure: Failure) -> None:
    double = FaultyService(fails=lambda question, before: failure if question == "3+1" and not before else None)
    workflow = catching(stream=failure in {"cut stream", "error event"})
    result = tuned(double, tmp_path, workflow, TASKS[3:4], concurrency=1)
    assert result.failures == {}
    assert {run: value for (_, run), value in double.rewards.items()} == {"0.1.1": 1.0, "1": 1.0}


@pytest.mark.contract
def test_a_service_that_is_away_for_a_moment_gives_no_bad_reward(tmp_path: Path) -> None:
    double, away = FaultyService(reply_s=0.01), []

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        if len(double.calls) == 3 and not away:
            double.away = True
            away.append(asyncio.get_running_loop().call_later(0.5, lambda: setattr(double, "away", False)))
        return await catching()(task, model)

    result = tuned(double, tmp_path, workflow, TASKS, concurrency=1)
    assert sorted(double.rewards.values()) == [1.0] * 16
    assert [each.failed for each in result.history] == [0, 0]


@pytest.mark.contract
@pytest.mark.parametrize("failure", [429, 502, 503, 504, "refused"])
def test_a_request_that_its_client_sent_again_and_that_was_answered_then_spoils_nothing(
    tmp_path: Path, failure: Failure
) -> None:
    double = FaultyService(fails=lambda question, before: failure if question == "3+1" and not before else None)
    result = tuned(double, tmp_path, catching(retries=2), TASKS[3:4], concurrency=1)
    assert result.failures == {}
    assert {run: value for (_, run), value in double.rewards.items()} == {"0": 1.0, "1": 1.0}


@pytest.mark.contract
def test_the_same_question_asked_beside_it_does_not_make_up_for_one_that_was_not_answered(tmp_path: Path) -> None:
    double = FaultyService(
        fails=lambda question, before: 503 if question == "3+1" and before % 3 == 0 else None, reply_s=0.1
    )

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        asked = [ask(task["question"], model, stream=False) for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return WorkflowOutput(reward=-float(sum(isinstance(each, Exception) for each in answers)))

    result = tuned(double, tmp_path, workflow, TASKS[2:4], concurrency=1)
    assert result.failures == {"service away": 2}
    assert sorted(double.rewards.values()) == [0.0, 0.0]


@pytest.mark.contract
def test_a_stream_that_the_workflow_breaks_off_is_rewarded_as_it_says(tmp_path: Path) -> None:
    double = FaultyService()

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        messages = [{"role": "user", "content": task["question"]}]
        async for _ in await model.chat.completions.create(model=MODEL, messages=messages, stream=True):
            break
        return WorkflowOutput(reward=0.5)

    result = tuned(double, tmp_path, workflow, TASKS)
    assert result.failures == {}
    assert sorted(double.rewards.values()) == [0.5] * 16


@pytest.mark.contract
def test_a_run_that_was_not_answered_is_not_judged_either(tmp_path: Path) -> None:
    double, judged = FaultyService(fails=lambda question, before: 503 if question in BAD else None), []

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        await catching()(task, model)
        return WorkflowOutput(response=task["question"])

    def judge(task: Any, response: Any) -> float:
        judged.append(response)
        return 0.0

    result = tuned(double, tmp_path, workflow, TASKS, judge_func=judge)
    assert result.failures == {"service away": 4}
    assert len(double.rewards) == 12
    assert BAD.isdisjoint(judged)
