"""Runs that give or do what nobody expects, and a disk that is full: the experiment can still be resumed."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.doubles.serving import serving
from tests.runner.tuning.service_double import MODEL, ServiceDouble
from tuneloop.runner import AlgorithmConfig, TuneFailed, WorkflowOutput, tune

TASKS = [{"question": f"{n}+1"} for n in range(4)]
SYNC = os.fsync


async def ask(task: Any, model: AsyncOpenAI) -> None:
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])


def go(url: str, folder: Path, workflow: Any, *, resume: bool = False) -> Any:
    return tune(
        workflow_func=workflow,
        train_dataset=TASKS,
        algorithm=AlgorithmConfig(group_size=2, batch_size=4),
        service=url,
        checkpoint_root_dir=folder,
        resume=resume,
    )


def test_names_of_metrics_with_any_characters_do_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        await ask(task, model)
        return WorkflowOutput(reward=1.0, metrics={"a\u2028line": 1.0, "b\x85": 2.0, "half \ud83d": 3.0, "nul\0": 4.0})

    double = ServiceDouble()
    with serving(double) as url:
        first = go(url, tmp_path, workflow)
        again = go(url, tmp_path, workflow, resume=True)
    assert (first.steps, again.folder) == (1, first.folder)
    names = {metric for _, _, metric in double.events}
    assert names == {"reward", "metrics/a\u2028line", "metrics/b\x85", "metrics/half ?", "metrics/nul?"}


def test_a_number_of_numpy_is_a_reward(tmp_path: Path) -> None:
    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        await ask(task, model)
        return np.float32(0.5)

    double = ServiceDouble()
    with serving(double) as url:
        assert go(url, tmp_path, workflow).failures == {}
    assert set(double.rewards.values()) == {0.5}


def test_what_a_full_disk_took_half_of_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]

    def refuse(descriptor: int) -> None:
        size, name = os.fstat(descriptor).st_size, os.readlink(f"/proc/self/fd/{descriptor}")
        if full and size > 200 and name.endswith("journal.jsonl"):
            os.ftruncate(descriptor, size - 40)
            raise OSError(errno.ENOSPC, "No space left on device")
        SYNC(descriptor)

    async def workflow(task: Any, model: AsyncOpenAI) -> Any:
        await ask(task, model)
        return 1.0

    monkeypatch.setattr(os, "fsync", refuse)
    double = ServiceDouble()
    with serving(double) as url:
        with pytest.raises(TuneFailed, match=r"journal\.jsonl cannot be written: .*No space left"):
            go(url, tmp_path, workflow)
        full.clear()
        assert go(url, tmp_path, workflow, resume=True).steps == 1
    assert len(double.rewards) == 8


CLINGS = """
import asyncio, sys
from tests.runner.tuning.service_double import MODEL
from tuneloop.runner import AlgorithmConfig, tune

async def workflow(task, model):
    await model.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task["question"]}])
    while task["question"] == "0+1":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    return 1.0

result = tune(
    workflow_func=workflow,
    train_dataset=[{"question": f"{n}+1"} for n in range(4)],
    algorithm=AlgorithmConfig(group_size=2, batch_size=4),
    service=sys.argv[1],
    checkpoint_root_dir=sys.argv[2],
    run_timeout=3,
    retries=0,
)
print(dict(result.failures))
"""


def test_a_workflow_that_catches_whatever_cancels_it_does_not_keep_the_end_waiting(tmp_path: Path) -> None:
    with serving(ServiceDouble()) as url:
        command = [sys.executable, "-c", CLINGS, url, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "{'workflow hung': 2}"


FINGERPRINT = """
from tuneloop.runner.tuning.experiment import TaskPlan

class Image:
    pass

print(TaskPlan(name="n", tasks=[{"image": Image(), "tags": {"a", "b", "c", "d"}}]).fingerprint())
"""


def test_tasks_with_objects_and_sets_are_the_same_in_the_process_that_resumes() -> None:
    found = set()
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-c", FINGERPRINT]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1
