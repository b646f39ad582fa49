"""The methods' settings: every one is accepted by tuneloop, for every task."""

import argparse
from pathlib import Path

import pytest

from examples.sums.folder import Folder
from examples.tasks.__main__ import changes
from examples.tasks.methods import METHODS
from examples.tasks.start import TASKS
from tuneloop.shared.settings.settings import Settings


def settings_of(root: Path, task: str, method: str, *changed: str, gpu: bool = False) -> Settings:
    folder = Folder(root)
    folder.start_afresh().close()
    options = argparse.Namespace(task=task, method=method, seed=1, start=root, gpu=gpu, set=list(changed))
    return folder.write_settings(seed=1, changes=changes(options))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_accepted_for_every_task(tmp_path: Path, task: str, method: str) -> None:
    settings = settings_of(tmp_path, task, method)
    assert settings.algorithm.algorithm_type == method
    assert settings.served_model_name == task
    assert (settings.explorer.rollout_model.tool_call_parser == "hermes") is bool(TASKS[task].tools)
    assert settings.buffer.group_by != "none" or METHODS[method].runs == 1
    assert settings.trainer.device == "cpu"
    teacher = tmp_path / "start" / f"{task}-1-teacher"
    assert settings.algorithm.distill.teacher_path == (teacher if METHODS[method].taught else None)


@pytest.mark.parametrize(("task", "calls"), [("sums", 1), ("tools", 1), ("calculator", 3)])
def test_a_step_compares_as_many_groups_on_every_task(tmp_path: Path, task: str, calls: int) -> None:
    buffer = settings_of(tmp_path, task, "multi_step_grpo").buffer
    assert buffer.train_batch_size / (calls * buffer.group_size) == 8
    assert settings_of(tmp_path, task, "reinforce").buffer.train_batch_size == 64
