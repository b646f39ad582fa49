"""The tiny start models of the examples: each is taught once per seed, and kept."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from examples.tasks.dialogue import Task
from examples.worlds.schooling import Schooling


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginner:
    """A world's start model: its size, whether its head is tied to its embeddings, and its schooling."""

    hidden: int
    layers: int
    schooling: Schooling
    is_tied: bool = False
    threads: int = 1


def start_model(task: Task, beginner: Beginner, folder: Path, *, seed: int, gpu: bool = False) -> Path:
    """The Hugging Face folder of the start model, made if missing, in minutes on a CPU."""
    path = folder / f"{task.name}-{seed}"
    if not (path / "taught.json").exists():
        # importing torch takes seconds
        import torch

        from examples.sums.model import save
        from examples.worlds import model as models
        from examples.worlds.warmup import teach

        if not gpu:
            torch.set_num_threads(beginner.threads)  # small matrices gain nothing from a second thread
        words = models.tokenizer(task)
        size = {"hidden": beginner.hidden, "layers": beginner.layers}
        model = models.build(words, **size, is_tied=beginner.is_tied, seed=seed)
        right = teach(task, model.to("cuda" if gpu else "cpu"), words, beginner.schooling, seed=seed)
        folder.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=folder))
        save(model.cpu(), words, staged)
        (staged / "taught.json").write_text(json.dumps({"parameters": models.parameters(model), "right": right}) + "\n")
        try:
            os.rename(staged, path)
        except OSError:
            if not (path / "taught.json").exists():  # otherwise another process was faster
                raise
    return path
