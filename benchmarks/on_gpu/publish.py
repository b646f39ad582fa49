"""What publishing takes, stage by stage, at several sizes: the trainer's publisher and a ledger, without a loop.

    python -m benchmarks.on_gpu.publish [--sizes 0.6b,4b,8b] [--versions 3] [--budget-seconds 150] [--work FOLDER]

Actors of random weights, an SQLite ledger and a real folder of checkpoints; versions are made of no rows. Critic and
optimiser are left out: they are written behind a version.
"weights" copies the actor from the GPU, writes and hashes it; "probe" asks it for log-probabilities; "sync" brings it
to disk; "register" gives it its name and its row. A size that fails is reported, and the next one is measured. The disk
must have room for three times the actor.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.on_gpu.random_model import make_model
from benchmarks.on_gpu.services import Clock
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publisher

_STAGES = ("weights", "probe", "sync", "register", "registered")


def main() -> int:
    """Measure and print a line for each version; 1 if a size failed."""
    options = _options()
    clock, failed = Clock(options.budget_seconds), 0
    disable_progress_bar()  # type: ignore[no-untyped-call]
    where = torch.cuda.get_device_name() if options.gpu else "CPU"
    print(f"{where}, torch {torch.__version__}; seconds of a version's stages, the actor alone")
    print(f"| size | version | bytes | {' | '.join(_STAGES)} | GB/s |\n|{'---|' * (4 + len(_STAGES))}", flush=True)
    for size in options.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="publish-", dir=options.work) as folder:
            try:
                _measure(size, Path(folder), options, clock)
            except Exception as error:  # noqa: BLE001 - the other sizes are still to be measured
                failed = 1
                clock.say(f"{size} failed: {error!r}")
        gc.collect()
        if options.gpu:
            torch.cuda.empty_cache()
        if clock.remaining < options.budget_seconds / 10:
            clock.say("the time is over")
            break
    return failed


def _measure(size: str, folder: Path, options: argparse.Namespace, clock: Clock) -> None:
    model = make_model(size, folder / "model", on_gpu=options.gpu)
    settings = Settings.model_validate(
        {
            "mode": "train",
            "checkpoint_root_dir": folder,
            "model": {"model_path": model, "max_model_len": 4096},
            "algorithm": {"algorithm_type": "sft"},
            "trainer": {
                "device": "cuda" if options.gpu else "cpu",
                "dtype": "bfloat16" if options.gpu else "float32",
                "max_checkpoints_to_keep": 1,
            },
            "cluster": {"gpu_per_node": int(options.gpu)},
        }
    )
    settings.job_dir.mkdir(parents=True, exist_ok=True)
    database.upgrade(settings.database_url)
    ledger = Ledger.of(settings)
    try:
        ledger.versions.ensure_base(model)
        learner = snapshot.load(settings, None)
        for weights in model.glob("*.safetensors"):  # Room for what is published.
            weights.unlink()
        clock.say(f"{size} is loaded")
        size_bytes = snapshot.size_of_weights(learner)
        epoch = ledger.training.take_epoch("benchmark")
        publisher = Publisher(settings, ledger, CheckpointStore(settings.job_dir), epoch=epoch)
        version, measured = 0, dict[str, float]()
        for _ in range(options.versions):
            if version and clock.remaining < 3 * measured["time/publish/registered"]:
                break
            began = time.perf_counter()
            publisher.begin(learner, [], steps=1, parent=version)
            outcome = publisher.end(learner)
            if outcome.version is None:
                raise RuntimeError(f"there is no room: {shutil.disk_usage(folder).free / 1e9:.1f} GB are free")
            version, measured, took = outcome.version, outcome.measured, time.perf_counter() - began
            publisher.states.join()  # what prunes old versions
            stages = [measured[f"time/publish/{stage}"] for stage in _STAGES]
            cells = " | ".join(f"{each:.3f}" for each in stages)
            rate = size_bytes / stages[-1] / 1e9
            print(f"| {size} | {version} | {size_bytes / 1e9:.2f} GB | {cells} | {rate:.2f} |", flush=True)
            clock.say(f"{took:.2f} s in the foreground in all")
        publisher.close()
    finally:
        ledger.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--sizes", default="0.6b,4b,8b" if on_gpu else "tiny")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=150.0)
    parser.add_argument("--work", type=Path, help="where to put everything; the disk that is to be measured")
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
