"""Killed and started again: no task is lost, and none is rewarded twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doubles.serving import serving
from tests.runner.tuning.interrupting.resumed import TASKS
from tests.runner.tuning.service_double import ServiceDouble
from tuneloop.runner import AlgorithmConfig, TuneRefused, tune
from tuneloop.runner.tuning.experiment import Journal

pytestmark = pytest.mark.contract

GROUP = 3
RUNS = len(TASKS) * GROUP


def start(url: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.runner.tuning.interrupting.resumed", url, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_after_sigkill_at_any_moment_every_run_is_rewarded_exactly_once(tmp_path: Path) -> None:
    double = ServiceDouble(reply_s=0.01, train_s=0.05)
    with serving(double) as url:
        for rewarded in (1, 10, 14, 25):
            process = start(url, tmp_path)
            wait_for(lambda rewarded=rewarded: len(double.rewards) >= rewarded, process)  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
            process.communicate()
        last = start(url, tmp_path)
        said, _ = last.communicate(timeout=240)
    assert last.returncode == 0, said
    [folder] = (tmp_path / "AgentScope").iterdir()
    assert Counter(task for task, _ in double.rewards) == {f"{folder.name}:{place}": GROUP for place in range(12)}
    assert double.rewards.keys() == double.committed
    assert double.accepted == 2 * RUNS, "each run: one reward and one metric"
    trained = [run for run, calls in double.calls.items() if calls[0]["train"]]
    assert len(trained) >= RUNS
    assert all(len(double.calls[run]) == 2 for run in double.rewards), "no attempt is mixed with another"
    results = [json.loads(line) for line in (folder / "tune" / "journal.jsonl").read_text().splitlines()]
    rewards = {
        (each["task_id"], each["run_id"]): each["rewards"]["model"]
        for each in results
        if "rewards" in each and each["event"] == "result"
    }
    assert rewards == double.rewards
    assert [each["step"] for each in results if each["event"] == "committed"] == [0, 1, 2]
    assert [each["step"] for each in results if each["event"] == "evaluated"] == [0, 2, 3]
    assert "step 3: reward" in said


def test_rewards_that_were_kept_and_not_acknowledged_are_given_again(tmp_path: Path) -> None:
    """As after a kill between the journal and the service's answer: the service knows the key, and takes it once."""
    double = ServiceDouble()
    with serving(double) as url:
        tune_all(url, tmp_path)
        [folder] = (tmp_path / "AgentScope").iterdir()
        journal = folder / "tune" / "journal.jsonl"
        kept = [line for line in journal.read_text().splitlines() if json.loads(line)["event"] in ("begin", "result")]
        journal.write_text("\n".join(kept) + '\n{"event":"ackn')
        accepted, rewards = double.accepted, dict(double.rewards)
        result = tune_all(url, tmp_path, resume=True)
    assert (double.accepted, double.rewards) == (accepted, rewards)
    assert double.duplicates == accepted
    assert result.folder == folder
    assert result.steps == 3


def test_an_experiment_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    double = ServiceDouble()
    with serving(double) as url:
        first = tune_all(url, tmp_path)
        asked = len(double.calls)
        again = tune_all(url, tmp_path, resume=True)
        assert len(double.calls) == asked
        assert again.folder == first.folder
        assert (again.before, again.after, again.steps) == (first.before, first.after, 3)
        other = tune_all(url, tmp_path)
    assert other.folder != first.folder


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    with serving(ServiceDouble()) as url:
        tune_all(url, tmp_path)
        with pytest.raises(TuneRefused, match="has other tasks, batch_size"):
            tune_all(url, tmp_path, tasks=TASKS[1:], resume=True)


def tune_all(url: str, folder: Path, *, tasks: list[dict[str, str]] = TASKS, resume: bool = False):  # type: ignore[no-untyped-def]
    from tests.runner.tuning.interrupting.resumed import guess

    return tune(
        workflow_func=guess,
        train_dataset=tasks,
        eval_dataset=tasks[:3],
        algorithm=AlgorithmConfig(group_size=GROUP, batch_size=4),
        service=url,
        checkpoint_root_dir=folder,
        resume=resume,
    )


def test_ctrl_c_leaves_what_a_resumed_call_goes_on_with(tmp_path: Path) -> None:
    double = ServiceDouble(reply_s=1.0, train_s=0.05)  # or all of it would be over before a busy machine looks
    with serving(double) as url:
        process = start(url, tmp_path)
        wait_for(lambda: len(double.rewards) >= 5, process)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=240)
        double.reply_s = 0.0
        assert process.returncode != 0
        assert "resume=True continues" in said
        last = start(url, tmp_path)
        last.communicate(timeout=240)
    assert last.returncode == 0
    assert len(double.rewards) == RUNS
    assert double.accepted == 2 * RUNS


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event":"begin"}\n{"event":"res\n{"event":"end"}\n')
    with pytest.raises(TuneRefused, match=r"journal\.jsonl, line 2 is damaged"):
        Journal(path)
    assert os.path.getsize(path) > 0
