"""What was interrupted goes on: commits whose answers were lost, steps that failed, trainers that are away."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner import AlgorithmConfig, DatasetConfig, ServiceAway, TuneFailed, TuneRefused, TuneResult, tune
from tuneloop.runner.tuning.config import TunerModelConfig
from tuneloop.runner.tuning.experiment import ExperimentFolder, Journal
from tuneloop.runner.tuning.services import ServiceOpener, ServiceOptions, ServiceProcess
from tuneloop.runner.tuning.tune import run_to_end

pytestmark = pytest.mark.contract

TASKS = [{"question": f"{n}+1"} for n in range(8)]
STEPS = AlgorithmConfig(group_size=2, batch_size=4)


async def ask(task: Any, model: AsyncOpenAI) -> float:
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    return 1.0


@pytest.fixture
def double() -> ServiceDouble:
    return ServiceDouble()


@pytest.fixture
def go(double: ServiceDouble, tmp_path: Path) -> Iterator[Callable[..., TuneResult]]:
    with serving(double) as url:
        good = {"workflow_func": ask, "train_dataset": TASKS, "algorithm": STEPS}
        good |= {"service": url, "checkpoint_root_dir": tmp_path}
        yield lambda **arguments: tune(**good | arguments)


def sampled(double: ServiceDouble) -> set[tuple[int, int]]:
    """Of each step, the versions that its runs were sampled by."""
    return {(int(task.rpartition(":")[2]) // 4, calls[0]["version"]) for (task, _), calls in double.calls.items()}


def journal_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tune" / "journal.jsonl").read_text().splitlines()]


def test_a_commit_whose_answer_was_lost_is_waited_for(go: Callable[..., TuneResult], double: ServiceDouble) -> None:
    double.lost_answers, double.train_s = 1, 0.5
    result = go()
    assert sampled(double) == {(0, 0), (1, 1)}, "the second step is of the version that the first made"
    assert [(each.version, each.published) for each in result.history] == [(1, True), (2, True)]


def test_a_commit_that_a_kill_kept_from_the_journal_is_waited_for(
    go: Callable[..., TuneResult], double: ServiceDouble
) -> None:
    first = go(train_dataset=TASKS[:4])
    journal = first.folder / "tune" / "journal.jsonl"
    lines = journal_of(first.folder)
    place = next(place for place, line in enumerate(lines) if line["event"] == "committed")
    assert lines[place - 1] == {"event": "committing", "step": 0, "before": {"model": {"newest": 0, "served": 0}}}
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines[:place]))
    # What the commit began is still going on.
    double.version, double.trainer_up = 0, False
    double._training += 1
    threading.Timer(0.5, lambda: (setattr(double, "version", 1), setattr(double, "_training", 0))).start()
    result = go(train_dataset=TASKS[:4], resume=True)
    assert [(each.version, each.published) for each in result.history] == [(1, True)]


def test_after_too_many_failures_what_failed_is_made_again(
    go: Callable[..., TuneResult], double: ServiceDouble
) -> None:
    broken = [True]

    async def moody(task: Any, model: AsyncOpenAI) -> float:
        await ask(task, model)
        if broken and task["question"] != "0+1":
            raise KeyError("no such tool")
        return 1.0

    with pytest.raises(TuneFailed, match="of 8 runs failed"):
        go(workflow_func=moody, retries=0)
    broken.clear()
    result = go(workflow_func=moody, retries=0, resume=True)
    assert [(each.runs, each.failed) for each in result.history] == [(8, 0), (8, 0)]
    assert len(double.rewards) == 16
    assert double.accepted == 16, "what was rewarded before is not rewarded again"


def test_without_a_trainer_it_says_so_and_stops(
    go: Callable[..., TuneResult], double: ServiceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    double.trainer_up = False
    with pytest.raises(ServiceAway, match=r"had no trainer for 0\.5 s"):
        go(service_timeout=0.5)
    assert "has no trainer, and commits wait" in capsys.readouterr().out
    double.trainer_up = True
    assert go(resume=True).steps == 2


def test_a_trainer_that_comes_back_in_time_is_waited_for(
    go: Callable[..., TuneResult], double: ServiceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    double.trainer_up = False

    def come_back() -> None:
        while not double._training:
            time.sleep(0.01)
        time.sleep(0.5)
        double.trainer_up, double.train_s = True, 0.5

    threading.Thread(target=come_back).start()
    assert go(service_timeout=30).version == 2
    said = capsys.readouterr().out
    assert said.count("has no trainer") == 1


def test_a_step_that_makes_no_progress_stops_it(go: Callable[..., TuneResult], double: ServiceDouble) -> None:
    double.train_s = 60
    with pytest.raises(TuneFailed, match=r"made no progress on the commit for 0\.3 s: no experience"):
        go(step_timeout=0.3)


def test_a_service_that_nobody_hears_of_is_given_up_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServiceAway, match=r"nothing answers at http://127\.0\.0\.1:9 for 0\.2 s.*is that its URL"):
        tune(
            workflow_func=ask,
            train_dataset=TASKS,
            service="http://127.0.0.1:9/v1",
            checkpoint_root_dir=tmp_path,
            join_timeout=0.2,
        )
    assert "joining the service at http://127.0.0.1:9" in capsys.readouterr().out


def test_a_service_that_is_not_ready_yet_has_more_time(go: Callable[..., TuneResult], double: ServiceDouble) -> None:
    double.away = True
    threading.Timer(1.0, lambda: setattr(double, "away", False)).start()
    assert go(join_timeout=0.2, start_timeout=30).steps == 2


ODD: list[tuple[dict[str, Any], str]] = [
    ({"max_staleness": -1}, "max_staleness must be a whole number of at least 0, not -1"),
    ({"max_staleness": 0.5}, "max_staleness must be a whole number"),
    ({"concurrency": -1}, "concurrency must be a whole number of at least 1"),
    ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
    ({"retries": -1}, "retries must be a whole number of at least 0"),
    ({"run_timeout": 0}, "run_timeout must be above 0"),
    ({"run_timeout": -5}, "run_timeout must be a number from 0"),
    ({"run_timeout": float("nan")}, "run_timeout must be a number"),
    ({"max_failures": 1.5}, "max_failures must be a number from 0 to 1"),
    ({"max_failures": "all"}, "max_failures must be a number"),
    ({"eval_temperature": -0.1}, "eval_temperature must be a number from 0 to 2"),
    ({"service_timeout": 0}, "service_timeout must be above 0"),
    ({"join_timeout": -1}, "join_timeout must be a number from 0"),
    ({"step_timeout": -1}, "step_timeout must be a number from 0"),
    ({"start_timeout": -1}, "start_timeout must be a number from 0"),
]


@pytest.mark.parametrize(("odd", "sentence"), ODD)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, odd: dict[str, Any], sentence: str) -> None:
    good = {"workflow_func": ask, "train_dataset": TASKS, "service": "http://127.0.0.1:9"}
    with pytest.raises(TuneRefused) as refused:
        tune(**good | {"checkpoint_root_dir": tmp_path} | odd)
    assert str(refused.value).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_one_experiment_is_gone_on_with_by_one_call_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    with pytest.raises(TuneRefused, match="is in use"):
        Journal(path)
    first.close()
    Journal(path).close()


def test_the_files_of_an_experiment_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = ExperimentFolder.open(tmp_path, "project", "name", resume=False)
        Journal(folder.journal).close()
        process = ServiceProcess(folder.settings("model"), folder.log("model"), command=["true"])
    finally:
        os.umask(before)
    process.stop()
    modes = {each.name: each.stat().st_mode & 0o777 for each in (folder.path, *folder.path.rglob("*"))}
    assert modes == {folder.name: 0o700, "tune": 0o700, "journal.jsonl": 0o600, "model.log": 0o600}


async def test_settings_of_a_started_service_are_their_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.runner.tuning.services.find_command", lambda: ["true"])
    folder = ExperimentFolder.open(tmp_path, "project", "name", resume=False)
    Journal(folder.journal).close()
    before = os.umask(0o022)
    try:
        async with AsyncExitStack() as stack:
            opener = ServiceOpener(folder, ServiceOptions(), stack, say=str)
            await opener._start("model", TunerModelConfig(model_path="m"), AlgorithmConfig(), {})
    finally:
        os.umask(before)
    assert folder.settings("model").stat().st_mode & 0o777 == 0o600


def test_more_epochs_run_the_rest_of_a_short_last_step(
    go: Callable[..., TuneResult], double: ServiceDouble, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in TASKS[:6]))
    once, twice = (DatasetConfig(str(tmp_path / "train.jsonl"), total_epochs=epochs) for epochs in (1, 2))
    assert go(train_dataset=once).steps == 2
    result = go(train_dataset=twice, resume=True)
    assert result.steps == 3
    assert [each.runs for each in result.history] == [8, 8, 8]
    places = sorted(int(task.rpartition(":")[2]) for task, _ in double.calls)
    assert places == sorted([*range(12)] * 2)
    assert double.committed == double.calls.keys()
    assert go(train_dataset=twice, resume=True).steps == 3
    assert len(double.calls) == 24


def test_a_run_of_many_metrics_is_rewarded(
    go: Callable[..., TuneResult], double: ServiceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuneloop.runner import WorkflowOutput

    async def talkative(task: Any, model: AsyncOpenAI) -> WorkflowOutput:
        return WorkflowOutput(reward=await ask(task, model), metrics={f"m{n}": n for n in range(260)})

    go(workflow_func=talkative, train_dataset=TASKS[:2])
    assert len(double.rewards) == 4
    assert len(double.events) == 4 * 201
    assert capsys.readouterr().out.count("a run has 260 metrics: the service gets the first 200 of each") == 1


def test_a_reward_that_is_not_kept_is_said(
    go: Callable[..., TuneResult], double: ServiceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    double.most_of_a_run = 0
    go(train_dataset=TASKS[:4])
    assert "the reward of" in (said := capsys.readouterr().out)
    assert "the service keeps no more feedback on them" in said


IN_A_CELL = """
import asyncio, os, signal, threading
from tuneloop.runner.tuning.tune import run_to_end

signal.signal(signal.SIGINT, signal.default_int_handler)
began = threading.Event()

async def work():
    began.set()
    try:
        await asyncio.sleep(60)
    finally:
        print("ended")

async def cell():
    threading.Thread(target=lambda: began.wait() and os.kill(os.getpid(), signal.SIGINT)).start()
    run_to_end(work)

loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(cell())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_within_a_running_loop_an_interrupt_ends_it_too() -> None:
    """As in a notebook, whose cells run in a loop and are stopped by SIGINT."""
    done = subprocess.run([sys.executable, "-c", IN_A_CELL], capture_output=True, text=True, check=False, timeout=50)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["ended", "interrupted"], "", 0)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_failures_traceback_begins_with_the_failure(in_loop: bool) -> None:
    async def work() -> Any:
        raise TuneFailed("too much")

    async def cell() -> Any:
        return run_to_end(work)

    with pytest.raises(TuneFailed) as failed:
        _ = asyncio.run(cell()) if in_loop else run_to_end(work)
    assert "no running event loop" not in "".join(traceback.format_exception(failed.value))


SCRIPT = """
import sys
from tests.runner.tuning.interrupting.test_interruptions import TASKS, ask
from tuneloop.runner import tune

async def fails(task, model):
    await ask(task, model)
    raise KeyError("no such tool")

tune(workflow_func=fails, train_dataset=TASKS[:2], service=sys.argv[1], checkpoint_root_dir=sys.argv[2], retries=0)
"""


def test_a_script_that_is_stopped_by_a_rule_ends_with_an_exit_code(tmp_path: Path) -> None:
    with serving(ServiceDouble()) as url:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, url, str(tmp_path)], capture_output=True, text=True, check=False, timeout=200
        )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("TuneFailed: step 1: ")
    assert "During handling" not in done.stderr
