"""How far rollouts run ahead of training, in which order tasks come, and at which temperature."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner import AlgorithmConfig, DatasetConfig, JudgeOutput, TuneFailed, TuneResult, TunerModelConfig, tune

TASKS = [{"question": f"{n}+1"} for n in range(8)]
STEPS = AlgorithmConfig(group_size=2, batch_size=2)


class PatientDouble(ServiceDouble):
    """Makes the version of a step when rollouts have run `ahead` steps beyond it, or can run no further."""

    ahead = 0

    async def _train(self) -> None:
        step = len(self.commits) if self.ahead else 0
        wanted = min(step + self.ahead, len(TASKS) // STEPS.batch_size) * STEPS.batch_size * STEPS.group_size
        for _ in range(600):
            if len(self.calls) >= wanted:
                break
            await asyncio.sleep(0.01)
        await super()._train()


@pytest.fixture
def double() -> PatientDouble:
    return PatientDouble()


@pytest.fixture
def url(double: ServiceDouble) -> Iterator[str]:
    with serving(double) as url:
        yield url


async def ask(task: Any, model: AsyncOpenAI) -> float:
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    return 1.0


def go(url: str, folder: Path, **how: Any) -> TuneResult:
    given = {"workflow_func": ask, "train_dataset": TASKS, "algorithm": STEPS} | how
    return tune(service=url, checkpoint_root_dir=folder, **given)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_rollouts_run_ahead_of_training_by_so_many_steps(
    url: str, double: PatientDouble, tmp_path: Path, staleness: int
) -> None:
    double.ahead = staleness
    result = go(url, tmp_path, max_staleness=staleness)
    sampled = {int(task.rpartition(":")[2]) // 2: calls[0]["version"] for (task, _), calls in double.calls.items()}
    assert sampled == {step: max(0, step - staleness) for step in range(4)}
    assert [each.version for each in result.history] == [1, 2, 3, 4]
    assert double.committed == double.calls.keys()


def test_an_evaluation_waits_for_the_version_that_it_is_of(url: str, double: PatientDouble, tmp_path: Path) -> None:
    result = go(
        url,
        tmp_path,
        eval_dataset=TASKS[:2],
        algorithm=AlgorithmConfig(group_size=2, batch_size=2, eval_interval_steps=2),
        max_staleness=2,
    )
    assert [(each.step, each.version) for each in result.evaluations] == [(0, 0), (2, 2), (4, 4)]
    asked = {run[0].rpartition(":evaluation:")[2]: calls[0]["version"] for run, calls in double.calls.items()}
    assert {asked[f"{step}:{place}"] - step for step in (0, 2, 4) for place in (0, 1)} == {0}


def questions(double: ServiceDouble) -> list[str]:
    """What was asked of each task, in the order of the tasks' places."""
    by_place = {
        int(task.rpartition(":")[2]): calls[0]["messages"][0]["content"] for (task, _), calls in double.calls.items()
    }
    return [by_place[place] for place in sorted(by_place)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_tasks_are_shuffled_anew_in_each_epoch(url: str, double: ServiceDouble, tmp_path: Path, shuffle: bool) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{task["question"]}"}}\n' for task in TASKS))
    arguments: dict[str, Any] = {
        "workflow_func": ask,
        "train_dataset": DatasetConfig(str(tmp_path / "train.jsonl"), total_epochs=2),
        "algorithm": STEPS,
        "service": url,
        "shuffle": shuffle,
    }
    tune(**arguments, checkpoint_root_dir=tmp_path / "one", seed=1)
    given = [task["question"] for task in TASKS]
    asked = questions(double)
    first, second = asked[:8], asked[8:]
    assert sorted(first) == sorted(second) == sorted(given)
    assert (first == given, second == given, first == second) == ((False,) * 3 if shuffle else (True,) * 3)
    double.calls.clear()
    tune(**arguments, checkpoint_root_dir=tmp_path / "again", seed=1)
    assert questions(double) == asked


def test_evaluations_may_sample_at_a_temperature_of_their_own(url: str, double: ServiceDouble, tmp_path: Path) -> None:
    go(
        url,
        tmp_path,
        train_dataset=TASKS[:2],
        eval_dataset=TASKS[:2],
        model=TunerModelConfig(model_path=MODEL, temperature=0.75),
        eval_temperature=0.0,
    )
    calls = [call for each in double.calls.values() for call in each]
    assert {(call["train"], call["temperature"]) for call in calls} == {(True, 0.75), (False, 0.0)}


@pytest.mark.parametrize("sync", [False, True])
def test_a_judge_that_hangs_is_given_up_and_counted(url: str, tmp_path: Path, sync: bool) -> None:
    async def hangs(task: Any, response: Any) -> JudgeOutput:
        await asyncio.Event().wait()
        raise AssertionError

    def blocks(task: Any, response: Any) -> JudgeOutput:
        asyncio.run(hangs(task, response))
        raise AssertionError

    with pytest.raises(TuneFailed, match=r"step 1: .* x judge hung"):
        go(url, tmp_path, judge_func=blocks if sync else hangs, train_dataset=TASKS[:2], run_timeout=0.3, retries=0)


def test_a_version_that_an_alarm_holds_back_is_waited_for_and_named(
    url: str, double: PatientDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double.held = "version 1 is made, and not served while these alarms are open: reward_jump (it fell)"

    def go(**but: Any) -> Any:
        arguments = {"service": url, "checkpoint_root_dir": tmp_path, "algorithm": STEPS} | but
        return tune(workflow_func=ask, train_dataset=TASKS[:2], **arguments)

    with pytest.raises(TuneFailed, match=r"made no progress on the commit for .* version 1 is made, and not served"):
        go(step_timeout=0.5)
    threading.Timer(1.0, lambda: setattr(double, "held", "")).start()
    assert go(resume=True).steps == 1
    assert capsys.readouterr().out.count("holds a version: version 1 is made, and not served") == 2
