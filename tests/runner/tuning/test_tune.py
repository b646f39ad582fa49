"""tune() against a service double: what it asks of a service, in which order, and what it says in the end."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner.tuning.config import AlgorithmConfig, JudgeOutput, WorkflowOutput
from tuneloop.runner.tuning.tune import tune

pytestmark = pytest.mark.contract

SUMS = [{"question": f"{n}+{n + 1}", "answer": str(2 * n + 1)} for n in range(8)]
SMALL = AlgorithmConfig(group_size=4, batch_size=2, eval_interval_steps=2)


@pytest.fixture
def double() -> ServiceDouble:
    return ServiceDouble()


@pytest.fixture
def url(double: ServiceDouble) -> Iterator[str]:
    with serving(double) as url:
        yield url


async def solve(task: dict[str, str], model: AsyncOpenAI) -> WorkflowOutput:
    reply = await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=reply.choices[0].message.content, metrics={"calls": 1})


def is_right(task: dict[str, str], response: str) -> JudgeOutput:
    return JudgeOutput(reward=float(response == task["answer"]), metrics={"length": len(response)})


def test_every_task_is_run_rewarded_and_committed_step_by_step(
    url: str, double: ServiceDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tune(
        workflow_func=solve,
        judge_func=is_right,
        train_dataset=SUMS,
        eval_dataset=SUMS,
        algorithm=SMALL,
        service=url,
        project_name="sums",
        experiment_name="small",
        checkpoint_root_dir=tmp_path,
    )
    trained = {run: calls for run, calls in double.calls.items() if calls[0]["train"]}
    assert Counter(task for task, _ in trained) == {f"{result.folder.name}:{position}": 4 for position in range(8)}
    assert double.rewards.keys() == trained.keys() == double.committed
    assert [len(commit["task_ids"]) for commit in double.commits] == [2, 2, 2, 2]
    assert {(calls[0]["version"], task.rpartition(":")[2]) for (task, _), calls in trained.items()} == {
        (position // 2, str(position)) for position in range(8)
    }, "step k + 1 begins when the version of step k is served"
    assert [(each.step, each.version) for each in result.evaluations] == [(0, 0), (2, 2), (4, 4)]
    assert result.before is not None
    assert result.after is not None
    assert (result.before.mean, result.after.mean) == (0.0, pytest.approx(0.4, abs=0.2))
    assert double.events[f"{result.folder.name}:0", "0", "metrics/length"] > 0
    assert result.folder.parent == tmp_path / "sums"
    printed = capsys.readouterr().out
    assert "step 4: reward 0." in printed
    assert f"curves: tensorboard --logdir {result.tensorboard}\n" in printed
    assert "reward before 0.000 [0.000, 0.324], n = 8; after" in printed


def test_plain_functions_run_in_threads_at_once(url: str, double: ServiceDouble, tmp_path: Path) -> None:
    double.reply_s = 0.3

    def solve(task: dict[str, str], model: OpenAI) -> WorkflowOutput:
        reply = model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
        return WorkflowOutput(reward=float(reply.choices[0].message.content == task["answer"]))

    result = tune(
        workflow_func=solve,
        train_dataset=SUMS,
        algorithm=AlgorithmConfig(group_size=4, batch_size=8),
        service=url,
        checkpoint_root_dir=tmp_path,
        concurrency=16,
    )
    assert 8 <= double.most_in_flight <= 16
    assert len(double.rewards) == 32
    assert result.steps == 1


def test_a_step_of_which_nothing_is_learnt_is_said_and_passed_over(
    url: str, double: ServiceDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.runner.tuning.views.importlib.util.find_spec", lambda name: None)  # no tensorboardX
    double.learns_nothing = True
    result = tune(
        workflow_func=solve,
        judge_func=is_right,
        train_dataset=SUMS,
        algorithm=SMALL,
        service=url,
        checkpoint_root_dir=tmp_path,
    )
    assert (result.steps, result.version) == (4, 0)
    printed = capsys.readouterr().out
    assert "step 1 made no new version: its rewards give no gradient" in printed
    assert "no curves of runs are written" in printed
    assert "curves: none in this folder" in printed
