"""What goes wrong with runs: counted by kind, shown once, and never trained on."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tests.runner.tuning.tuned import tuned
from tuneloop.runner import AlgorithmConfig, JudgeOutput, ServiceAway, TuneFailed, WorkflowOutput, tune

TASKS = [{"question": f"{n}+1", "bad": n % 4 == 3} for n in range(8)]
STEPS = AlgorithmConfig(group_size=2, batch_size=4)


async def ask(task: Any, model: AsyncOpenAI, name: str = MODEL) -> str:
    reply = await model.chat.completions.create(model=name, messages=[{"role": "user", "content": task["question"]}])
    return reply.choices[0].message.content or ""


async def raises(task: Any, model: AsyncOpenAI) -> Any:
    await ask(task, model)
    raise KeyError("no such tool")


async def hangs(task: Any, model: AsyncOpenAI) -> Any:
    await ask(task, model)
    await asyncio.Event().wait()


async def gives_no_reward(task: Any, model: AsyncOpenAI) -> Any:
    return WorkflowOutput(response=await ask(task, model))


async def gives_nothing(task: Any, model: AsyncOpenAI) -> Any:
    await ask(task, model)


async def gives_nan(task: Any, model: AsyncOpenAI) -> Any:
    await ask(task, model)
    return WorkflowOutput(reward=math.nan)


async def calls_none(task: Any, model: AsyncOpenAI) -> Any:
    return WorkflowOutput(reward=1.0)


async def calls_another(task: Any, model: AsyncOpenAI) -> Any:
    await ask(task, model, "gpt-4")
    return WorkflowOutput(reward=1.0)


async def ends_the_process(task: Any, model: AsyncOpenAI) -> Any:
    raise SystemExit(3)


async def awaits_what_was_cancelled(task: Any, model: AsyncOpenAI) -> Any:
    cancelled = asyncio.ensure_future(ask(task, model))
    cancelled.cancel()
    await cancelled


async def raises_a_group(task: Any, model: AsyncOpenAI) -> Any:
    raise BaseExceptionGroup("of a group of tasks", [asyncio.CancelledError(), KeyError("no such tool")])


async def raises_what_has_no_text(task: Any, model: AsyncOpenAI) -> Any:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyError("text")

    raise Unspeakable


async def gives_a_list_as_metrics(task: Any, model: AsyncOpenAI) -> Any:
    return WorkflowOutput(reward=1.0, metrics=[1.0])  # type: ignore[arg-type]


def workflow_with(failure: Callable[..., Any]) -> Callable[..., Any]:
    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        if task["bad"]:
            return await failure(task, model)
        await ask(task, model)
        return WorkflowOutput(reward=1.0)

    return workflow


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (raises, "workflow raised"),
        (ends_the_process, "workflow raised"),
        (awaits_what_was_cancelled, "workflow raised"),
        (raises_a_group, "workflow raised"),
        (raises_what_has_no_text, "workflow raised"),
        (gives_a_list_as_metrics, "workflow raised"),
        (hangs, "workflow hung"),
        (gives_no_reward, "no reward"),
        (gives_nothing, "no reward"),
        (gives_nan, "reward is not a number"),
        (calls_none, "called no model"),
        (calls_another, "called another model"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_run_that_fails_is_counted_by_kind_and_not_rewarded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: Callable[..., Any], kind: str
) -> None:
    double = ServiceDouble()
    result = tuned(double, tmp_path, workflow_with(failure), TASKS, run_timeout=1.5 if failure is hangs else 60.0)
    assert result.failures == {kind: 4}
    assert [(each.runs, each.failed) for each in result.history] == [(8, 2), (8, 2)]
    bad = {f"{result.folder.name}:{place}" for place in (3, 7)}
    assert {task for task, _ in double.rewards} & bad == set()
    assert len(double.rewards) == 12
    printed = capsys.readouterr().out
    assert printed.count(f"] {kind}, task ") == 1
    assert ("KeyError: 'no such tool'" in printed) is (failure in (raises, raises_a_group))
    assert f"failed: 4 x {kind}" in printed


def test_a_run_that_raises_once_is_tried_again_under_another_name(tmp_path: Path) -> None:
    double, tries = ServiceDouble(), []

    async def moody(task: Any, model: AsyncOpenAI) -> Any:
        await ask(task, model)
        tries.append(task["question"])
        if len(tries) == 1:
            raise ConnectionError("the tool's server hiccuped")
        return WorkflowOutput(reward=1.0)

    result = tuned(double, tmp_path, moody, TASKS[:1], concurrency=1)
    assert result.failures == {}
    assert sorted(run for _, run in double.calls) == ["0", "0.1.1", "1"]
    assert sorted(run for _, run in double.rewards) == ["0.1.1", "1"]


def test_a_judge_that_raises_is_asked_again_and_then_counted(tmp_path: Path) -> None:
    asked = []

    def judge(task: Any, response: Any) -> JudgeOutput:
        asked.append(task["question"])
        if task["bad"] or len(asked) == 1:
            raise ValueError("cannot parse")
        return JudgeOutput(reward=1.0)

    double = ServiceDouble()
    result = tuned(double, tmp_path, gives_no_reward, TASKS, judge_func=judge)
    assert result.failures == {"judge raised": 4}
    assert len(double.calls) == 16, "the workflow is not run again for its judge"


def test_a_judge_that_fails_while_the_service_is_away_is_asked_when_it_is_back(tmp_path: Path) -> None:
    double, asked = ServiceDouble(), []

    def judge(task: Any, response: Any) -> JudgeOutput:
        asked.append(task["question"])
        if len(asked) == 1:
            double.away = True
            threading.Timer(0.5, lambda: setattr(double, "away", False)).start()
            raise ConnectionError("the service is away")
        return JudgeOutput(reward=1.0)

    result = tuned(double, tmp_path, gives_no_reward, TASKS[:1], judge_func=judge, retries=0, concurrency=1)
    assert result.failures.keys() <= {"service away", "workflow raised"}
    assert result.failures["service away"] >= 1
    assert len(asked) == 3


def test_workflows_go_on_while_judges_think(tmp_path: Path) -> None:
    double, all_asked = ServiceDouble(), asyncio.Event()

    async def judge(task: Any, response: Any) -> JudgeOutput:
        while len(double.calls) < 8:  # noqa: ASYNC110 - the double lives in another thread
            await asyncio.sleep(0.01)
        all_asked.set()
        return JudgeOutput(reward=1.0)

    result = tuned(
        double, tmp_path, gives_no_reward, TASKS[:4], judge_func=judge, concurrency=2, run_timeout=20, retries=0
    )
    assert result.failures == {}
    assert double.most_in_flight <= 2
    assert all_asked.is_set()


def test_too_many_failures_stop_it(tmp_path: Path) -> None:
    with serving(ServiceDouble()) as url:
        with pytest.raises(
            TuneFailed, match=r"step 1: 2 of 8 runs failed \(2 x workflow raised\); max_failures is 0\.2"
        ):
            tune(
                workflow_func=workflow_with(raises),
                train_dataset=TASKS,
                algorithm=STEPS,
                service=url,
                checkpoint_root_dir=tmp_path,
                max_failures=0.2,
            )
        with pytest.raises(TuneFailed, match=r"\d of 8 runs failed"):
            tune(workflow_func=raises, train_dataset=TASKS, algorithm=STEPS, service=url, checkpoint_root_dir=tmp_path)


def test_a_service_that_is_away_for_a_moment_costs_nothing(tmp_path: Path) -> None:
    double = ServiceDouble(reply_s=0.01)

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        if len(double.calls) == 3 and not double.rewards.get(("", "")):
            double.away = True
            asyncio.get_running_loop().call_later(1.0, lambda: setattr(double, "away", False))
        return WorkflowOutput(reward=float(len(await ask(task, model.with_options(max_retries=0)))))

    with serving(double) as url:
        result = tune(
            workflow_func=workflow, train_dataset=TASKS, algorithm=STEPS, service=url, checkpoint_root_dir=tmp_path
        )
    assert len(double.rewards) == 16
    assert [each.failed for each in result.history] == [0, 0]


def test_a_service_that_stays_away_stops_it_and_resume_goes_on(tmp_path: Path) -> None:
    double = ServiceDouble()

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        double.away = len(double.calls) >= 10 and not resumed
        return WorkflowOutput(reward=float(len(await ask(task, model.with_options(max_retries=0)))))

    resumed: list[bool] = []
    with serving(double) as url:

        def call() -> Any:
            return tune(
                workflow_func=workflow,
                train_dataset=TASKS,
                algorithm=STEPS,
                service=url,
                checkpoint_root_dir=tmp_path,
                service_timeout=1.0,
                concurrency=1,
                resume=True,
            )

        with pytest.raises(ServiceAway, match=r"did not answer for 1 s: 503"):
            call()
        double.away = False
        resumed.append(True)
        call()
    assert len(double.rewards) == 16
    assert double.accepted == 16


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
        ServiceDouble(),
        tmp_path,
        slow,
        TASKS[:4],
        judge_func=judge_that_sleeps,
        algorithm=AlgorithmConfig(group_size=2, batch_size=2),
        run_timeout=2.0,
    )
    assert result.failures == {}
    told = [line for line in capsys.readouterr().out.splitlines() if "blocked the event loop" in line]
    assert len(told) == 1
    assert "judge judge_that_sleeps blocked the event loop and all other runs for 1." in told[0]
