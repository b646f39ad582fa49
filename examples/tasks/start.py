"""The tasks by name, and the models that they start from: warmed up once for each seed, and kept."""

import json
from pathlib import Path

from examples.sums import model as sums_model
from examples.sums import warmup as sums_warmup
from examples.tasks import warmup
from examples.tasks.calculator import Calculator
from examples.tasks.dialogue import Task
from examples.tasks.sums import Sums
from examples.tasks.tools import Shop

TASKS: dict[str, Task] = {task.name: task for task in (Sums(), Shop(), Calculator())}
"""By name."""


def start(folder: Path, task: str, seed: int) -> Path:
    """The Hugging Face folder of the start model, made if missing."""
    return _make(folder / "start" / f"{task}-{seed}", task, seed, slips=True)


def teacher(folder: Path, task: str, seed: int) -> Path:
    """The folder of a model of that size which gets nearly all right, made if missing."""
    return _make(teacher_of(folder, task, seed), task, seed, slips=False)


def teacher_of(folder: Path, task: str, seed: int) -> Path:
    """The folder of `teacher`."""
    return folder / "start" / f"{task}-{seed}-teacher"


def _make(path: Path, task: str, seed: int, *, slips: bool) -> Path:
    done = path / "warmed_up.json"
    if not done.exists():
        if task == "sums":  # The demo's own.
            model, words = sums_model.build(seed)
            share = sums_warmup.warm_up(model, words, seed, lambda _done, _of: None, slips=slips)
        else:
            model, words = warmup.build(seed)
            share = warmup.warm_up(TASKS[task], model, words, seed=seed, slips=slips)
        sums_model.save(model, words, path)
        done.write_text(json.dumps({"right": share}) + "\n")
    return path
