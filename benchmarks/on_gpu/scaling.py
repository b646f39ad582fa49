"""A step by one worker and by two: tokens a second, their ratio, and that both come to the same numbers.

    python -m benchmarks.on_gpu.scaling [--size 4b] [--method sft] [--sequences 64,128] [--steps 3]
        [--mean 675] [--longest 2475] [--bits 8] [--settings ulysses_sequence_parallel_size=2] [--both-only]
        [--budget-seconds 180] [--workers 2] [--work FOLDER]

The trainer's own launcher starts the workers, a GPU each, which sum gradients by NCCL (by gloo on a CPU). They make the
same steps twice from the same weights: first rank 0 alone, while the others wait, then all together (`--both-only`:
this alone). The largest relative difference of loss, entropy and gradient norm is printed, and the most that rank 0
allocated. Weights and replies are random, as in `benchmarks/train_step.py`; a step is the best of some, after one to
warm up.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.utils.logging import disable_progress_bar

from benchmarks.on_gpu.services import Clock
from benchmarks.train_step import GROUP, METHODS, SHAPES, made_samples, make_model, peak_memory
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch, fit_to_memory, must_shard
from tuneloop.trainer.models.model import device_of
from tuneloop.trainer.parallel import ALONE, EndOrder, JoinedRanks, Ranks
from tuneloop.trainer.rendezvous import RENDEZVOUS_VARIABLE
from tuneloop.trainer.workers.launching import launch
from tuneloop.trainer.workers.rank import follow

#: By size and bits of AdamW's moments. A model of 4 B with its masters and moments takes 72 GB, or 48 in 8 bits.
_LEAST_BYTES = {("4b", 32): 100 << 30, ("4b", 8): 70 << 30}
_FOR_GOOD = 2
#: What two ways to add the same numbers up may differ by.
_NAMES = ("loss", "grad_norm", "entropy", "kl")


def main() -> int:
    """Start the workers, or be one; 1 if it fails."""
    options = _options()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if RENDEZVOUS_VARIABLE in os.environ:
        return _take_part(options)
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=options.work) as folder:
        size = _size_for(options)
        device = torch.device("cuda" if options.gpu else "cpu")
        began = time.monotonic()
        make_model(size, Path(folder) / "model", torch.bfloat16 if options.gpu else torch.float32, device)
        name = torch.cuda.get_device_name() if options.gpu else "CPU"
        taken = time.monotonic() - began
        what = f"Qwen3 {size}, {options.method}; the model was made in {taken:.0f} s"
        print(f"{options.workers} x {name}, torch {torch.__version__}; {what}", flush=True)
        left = options.budget_seconds - taken
        command = [sys.executable, "-m", "benchmarks.on_gpu.scaling", "--folder", folder, *_flags(options)]
        command += ["--size", size, "--budget-seconds", str(left)]
        return launch(command, options.workers, threading.Event())


def _size_for(options: argparse.Namespace) -> str:
    """The size, or one that fits the GPU."""
    least = _LEAST_BYTES.get((options.size, options.bits), 0)
    if options.gpu and torch.cuda.get_device_properties(0).total_memory < least:
        print(f"{options.size} does not fit this GPU: 1.7b", flush=True)
        return "1.7b"
    return str(options.size)


def _flags(options: argparse.Namespace) -> list[str]:
    names = ("method", "sequences", "steps", "workers", "tokens", "mean", "longest", "bits", "settings")
    flags = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    return [*flags, "--gpu" if options.gpu else "--no-gpu", *(["--both-only"] if options.both_only else [])]


def _take_part(options: argparse.Namespace) -> int:
    """As the rank that the environment names. What goes wrong ends all for good: nothing is made again."""
    try:
        settings = _settings(options)
        ranks = JoinedRanks.join(device_of(settings), together=settings.trainer.ulysses_sequence_parallel_size)
        ranks.shards = bool(ranks.decide(lambda: must_shard(settings)))
        settings = fit_to_memory(settings)
        if ranks.rank:
            follow(settings, ranks)
        else:
            _lead(settings, ranks, options)
            ranks.lead(EndOrder())
        ranks.leave()
    except Exception:  # noqa: BLE001 - whatever it is, the launcher must not start again
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(_FOR_GOOD)
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    chosen = dict(each.split("=") for each in options.settings.split(",") if each)
    return Settings.model_validate(
        {
            "mode": "train",
            "checkpoint_root_dir": options.folder,
            "model": {"model_path": options.folder / "model"},
            "algorithm": {
                "algorithm_type": options.method,
                **METHODS[options.method],
                "kl_coef": 0.0,
                "optimizer": {"bits": options.bits},
            },
            "buffer": {"group_by": "task", "group_size": GROUP},
            "trainer": {
                "device": "cuda" if options.gpu else "cpu",
                "dtype": "bfloat16" if options.gpu else "float32",
                "micro_batch_tokens": options.tokens or None,
                "workers": options.workers,
                **chosen,
            },
            "cluster": {"gpu_per_node": options.workers if options.gpu else 0},
        }
    )


def _lead(settings: Settings, ranks: JoinedRanks, options: argparse.Namespace) -> None:
    clock = Clock(options.budget_seconds)
    print("| sequences | tokens | workers | a step | tokens/s | ratio | memory | largest relative difference |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    config = Qwen3Config.from_pretrained(settings.model.model_path)
    longest = min(options.longest, config.max_position_embeddings)
    for count in map(int, options.sequences.split(",")):
        samples = made_samples(count, options.mean, longest, config.vocab_size)
        tokens = sum(len(each.prompt_ids) + len(each.completion_ids) for each in samples)
        took: dict[int, float] = {}
        found: dict[int, list[Metrics]] = {}
        for who in (ranks,) if options.both_only else (ALONE, ranks):
            memory: list[int] = []
            with peak_memory(device_of(settings), memory):
                took[who.size], found[who.size] = _steps(settings, who, samples, options, clock)
            ratio, difference = "–", "–"
            if who is ranks and not options.both_only:
                ratio, (number, name) = f"{took[1] / took[who.size]:.3f}", _difference(found[1], found[who.size])
                difference = f"{number:.2e} ({name})"
            print(
                f"| {count} | {tokens:,} | {who.size} | {took[who.size]:.3f} s | {tokens / took[who.size]:,.0f} | "
                f"{ratio} | {memory[0] / 2**30:.1f} GiB | {difference} |",
                flush=True,
            )
        for step, (one, other) in enumerate(zip(found.get(1, ()), found[ranks.size], strict=False)):
            pairs = {name: (one[name], other[name]) for name in _names_compared(one)}
            print(f"step {step}: " + ", ".join(f"{name} {a:.6g} and {b:.6g}" for name, (a, b) in pairs.items()))
        if clock.remaining < options.budget_seconds / 3:
            clock.say("the time is over")
            break


def _steps(
    settings: Settings, ranks: Ranks, samples: Sequence[Sample], options: argparse.Namespace, clock: Clock
) -> tuple[float, list[Metrics]]:
    """The best time of a step, and the metrics of each, from the base model's weights."""
    learner, micro_batch = snapshot.load(settings, None, ranks), MicroBatch(settings)
    clock.say(f"{ranks.size} workers: loaded, {micro_batch.tokens} tokens at once; sharded: {learner.ranks.is_sharded}")
    taken, found = [], []
    for number in range(options.steps + 1):
        _wait(learner)
        began = time.perf_counter()
        found.append(micro_batch.step(learner, samples, version=None))
        _wait(learner)
        taken.append(time.perf_counter() - began)
        if number == 0:
            clock.say(f"{ranks.size} workers: the first step took {taken[0]:.1f} s")
    del learner
    gc.collect()
    if options.gpu:
        torch.cuda.empty_cache()
    return min(taken[1:]), found


def _wait(learner: Learner) -> None:
    if learner.actor.network.device.type == "cuda":
        torch.cuda.synchronize()


def _names_compared(metrics: Metrics) -> list[str]:
    return [name for name in metrics if any(part in name for part in _NAMES)]


def _difference(one: Sequence[Metrics], other: Sequence[Metrics]) -> tuple[float, str]:
    """The largest relative difference of any number of any step, and which it is."""
    return max(
        (abs(mine[name] - others[name]) / max(abs(mine[name]), 1e-6), f"step {step} {name}")
        for step, (mine, others) in enumerate(zip(one, other, strict=True))
        for name in _names_compared(mine)
    )


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SHAPES, default="4b" if on_gpu else "tiny")
    parser.add_argument("--method", choices=("sft", "grpo", "reinforce", "ppo"), default="sft")
    parser.add_argument("--sequences", default="64,128" if on_gpu else "16", help="in a batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=0, help="trainer.micro_batch_tokens; 0: what fits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mean", type=int, default=675 if on_gpu else 60, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=2475)
    parser.add_argument("--bits", type=int, choices=[8, 32], default=32, help="of AdamW's moments")
    parser.add_argument("--settings", default="", help="of `trainer`, with commas: optimizer_offload=true")
    parser.add_argument("--both-only", action="store_true", help="only all workers together")
    parser.add_argument("--budget-seconds", type=float, default=180.0)
    parser.add_argument("--work", type=Path, help="where to put the model")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=on_gpu)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
