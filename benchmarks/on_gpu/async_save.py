"""What a version after each step costs the trainer: published before the next step, behind it, and none at all.

    python -m benchmarks.on_gpu.async_save [--size 0.6b] [--method ppo] [--sequences 64] [--mean 675] [--longest 2475]
        [--seconds 40] [--modes none,sync,async] [--work FOLDER]

One learner, the trainer's publisher, an SQLite ledger and a real folder of checkpoints, critic and optimiser of
each version; the batch is always the same, its rows are not in the ledger. Each mode in turn: steps a
second, and what the time went into: the steps, publishing in the foreground, the rest; and the medians of a version's
stages. What comes once in a trainer's life came before: layers compiled, memory pinned. Weights and replies are random.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.on_gpu.random_model import make_model
from benchmarks.train_step import METHODS, made_samples
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.micro_batch import fit_to_memory

_WARM_UP = 2


class Phase(NamedTuple):
    """What a mode came to. All but `steps` and `versions` are seconds, `stages` those of each version that had them."""

    steps: int
    versions: int
    all: float
    stepping: float
    publishing: float
    stages: Mapping[str, Sequence[float]]

    def line(self, mode: str, alone: float) -> str:
        """Its row; `alone`: steps a second without versions."""
        rate, parts = (
            self.steps / self.all,
            (self.stepping, self.publishing, self.all - self.stepping - self.publishing),
        )
        shares = " | ".join(f"{part / self.all:.1%}" for part in parts)
        stages = ", ".join(f"{name} {median(took):.3f} ({len(took)})" for name, took in sorted(self.stages.items()))
        speed = f"{rate:.2f} | {rate / alone:.2f} | {self.stepping / self.steps:.3f} s"
        return f"| {mode} | {self.steps}, {self.versions} | {speed} | {shares} | {stages} |"


def main() -> int:
    """Measure and print a line for each mode."""
    options = _options()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    where = torch.cuda.get_device_name() if options.gpu else "CPU"
    print(f"{where}, torch {torch.__version__}; {options.size}, {options.method}, {options.sequences} sequences")
    heads = ("mode", "steps, versions", "steps/s", "of none", "a step", "steps", "publishing", "the rest", "stages, s")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    with tempfile.TemporaryDirectory(prefix="async-save-", dir=options.work) as folder:
        settings = _settings(options, Path(folder))
        samples = made_samples(options.sequences, options.mean, options.longest, 150)
        alone = 0.0
        for mode in options.modes.split(","):
            phase = _measure(mode, settings, samples, options.seconds)
            alone = alone or phase.steps / phase.all
            print(phase.line(mode, alone), flush=True)
            gc.collect()
            if options.gpu:
                torch.cuda.empty_cache()
    return 0


def _settings(options: argparse.Namespace, folder: Path) -> Settings:
    model = make_model(options.size, folder / "model", on_gpu=options.gpu)
    settings = Settings.model_validate(
        {
            "mode": "train",
            "checkpoint_root_dir": folder,
            "model": {"model_path": model, "max_model_len": 4096},
            "algorithm": {"algorithm_type": options.method, **METHODS[options.method]},
            "buffer": {"group_by": "task", "group_size": 8},
            "trainer": {
                "device": "cuda" if options.gpu else "cpu",
                "dtype": "bfloat16" if options.gpu else "float32",
                "max_checkpoints_to_keep": 2,
            },
            "cluster": {"gpu_per_node": int(options.gpu)},
        }
    )
    settings.job_dir.mkdir(parents=True, exist_ok=True)
    database.upgrade(settings.database_url)
    return fit_to_memory(settings)


def _measure(mode: str, settings: Settings, samples: list[Sample], seconds: float) -> Phase:
    ledger, learner = Ledger.of(settings), snapshot.load(settings, None)
    ledger.versions.ensure_base(settings.model.model_path)
    store = CheckpointStore(settings.job_dir)
    epoch = ledger.training.take_epoch(mode)
    publisher = Publisher(settings, ledger, store, epoch=epoch, behind=mode == "async")
    publisher.prepare(learner)
    parent = ledger.versions.newest().version
    for _ in range(_WARM_UP):
        learner.step(samples)
    if mode != "none":
        publisher.begin(learner, [], steps=_WARM_UP, parent=parent)
        publisher.wait()
        parent = publisher.end(learner).version or parent
    steps = versions = unpublished = 0
    stepping = publishing = 0.0
    stages: defaultdict[str, list[float]] = defaultdict(list)
    began = time.perf_counter()
    while (stepped := time.perf_counter()) - began < seconds:
        learner.step(samples)
        started = time.perf_counter()
        stepping, steps, unpublished = stepping + started - stepped, steps + 1, unpublished + 1
        if mode == "none":
            continue
        for begin in (False, True):  # What is over is ended first; in the foreground what was begun is over at once.
            if begin and not publisher.steps_begun:
                publisher.begin(learner, [], steps=unpublished, parent=parent)
            if publisher.is_over:
                ended = publisher.end(learner)
                parent, unpublished, versions = ended.version or parent, unpublished - ended.steps, versions + 1
                _add(stages, ended.measured)
        publishing += time.perf_counter() - started
    took = time.perf_counter() - began
    publisher.wait()
    publisher.close()
    for _, measured in publisher.states.drain():
        _add(stages, measured)
    ledger.close()
    return Phase(steps, versions, took, stepping, publishing, stages)


def _add(stages: Mapping[str, list[float]], measured: Metrics) -> None:
    for name, value in measured.items():
        stages[name.removeprefix("time/").removeprefix("publish/")].append(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--method", default="ppo", choices=("ppo", "reinforce", "grpo", "sft"))
    parser.add_argument("--sequences", type=int, default=64 if on_gpu else 16)
    parser.add_argument("--mean", type=int, default=675 if on_gpu else 60, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=2475 if on_gpu else 200)
    parser.add_argument("--seconds", type=float, default=40.0 if on_gpu else 10.0, help="of each mode")
    parser.add_argument("--modes", default="none,sync,async", help="the first is what the others are divided by")
    parser.add_argument("--work", type=Path, help="where to put everything; the disk that is to be measured")
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
