"""TRL's step of GRPO on the batch that `benchmarks.train_step` measures, as a row of the same table.

    python -m benchmarks.on_gpu.trl_step [--size 0.6b|tiny] [--sequences 64] [--steps 3] [--rows 8]

Needs trl 1.16, accelerate and datasets beside what tuneloop needs. TRL's own loop runs (accelerate, fused AdamW,
clipping, a reference), but samples nothing: the replies and their log-probabilities are handed to it, so that seconds
are those of scoring and learning. `--rows` sequences are padded together, with activations made again, TRL's default.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.on_gpu.random_model import tokenizer
from benchmarks.train_step import (
    GROUP,
    METHODS,
    PASSES,
    SHAPES,
    Figures,
    forward_flops,
    made_samples,
    make_model,
    peak_flops,
    peak_memory,
)
from tuneloop.shared.experience import Sample


class _Clock(TrainerCallback):
    """Seconds of each step, scoring included; ends a run that takes too long."""

    def __init__(self, budget_seconds: float) -> None:
        self._end = time.perf_counter() + budget_seconds
        self._began = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = _now()

    def on_step_end(self, _arguments: Any, _state: Any, control: Any, **__: Any) -> None:
        self.seconds.append(_now() - self._began)
        control.should_training_stop = control.should_training_stop or time.perf_counter() > self._end


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class _Replies:
    """Stands for sampling: each prompt's number is that of a group, whose replies are given one after the other."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __call__(self, prompts: Sequence[str], _trainer: Any) -> dict[str, list[Any]]:
        given = dict[int, int]()
        said = list[Sample]()
        for group in map(int, prompts):
            said.append(self._samples[group * GROUP + given.get(group, 0)])
            given[group] = given.get(group, 0) + 1
        if sorted(each.id for each in said) != list(range(len(self._samples))):
            raise ValueError(f"TRL asked for {len(said)} replies that are not the batch's {len(self._samples)}")
        return {
            "prompt_ids": [each.prompt_ids.tolist() for each in said],
            "completion_ids": [each.completion_ids.tolist() for each in said],
            "logprobs": [each.logprobs.tolist() for each in said],
            "reward": [each.reward for each in said],
        }


def _rewards(completions: Sequence[str], reward: Sequence[float], **_: object) -> list[float]:
    del completions
    return list(reward)


def measure(folder: Path, samples: Sequence[Sample], options: argparse.Namespace) -> tuple[list[float], int]:
    """Seconds of each step after the first, and the most bytes."""
    on_gpu, memory = options.device == "cuda", list[int]()
    network = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    clock = _Clock(options.budget_seconds)
    config = GRPOConfig(
        output_dir=str(folder.parent / "trl"),
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=len(samples) // options.rows,
        num_generations=GROUP,
        max_completion_length=max(len(each.completion_ids) for each in samples),
        beta=METHODS["grpo"]["kl_coef"],
        learning_rate=1e-6,
        max_steps=options.steps + 1,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    groups = InMemoryTable.from_pydict({"prompt": [str(group) for group in range(len(samples) // GROUP)]})
    prompts = Dataset(groups, fingerprint="groups")  # Making one by itself pickles pyarrow's types, which may fail.
    with peak_memory(torch.device(options.device), memory):
        trainer = GRPOTrainer(
            model=network,
            args=config,
            reward_funcs=_rewards,
            train_dataset=prompts,
            processing_class=tokenizer(network.config.vocab_size),
            rollout_func=_Replies(samples),
            callbacks=[clock],
        )
        trainer.train()
    if len(clock.seconds) < 2:
        raise RuntimeError("the time was over after the step to warm up")
    return clock.seconds[1:], memory[0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SHAPES, default="0.6b" if on_gpu else "tiny")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--mean", type=int, default=675, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=2475)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget-seconds", type=float, default=150)
    options = parser.parse_args()
    options.device, options.dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    if options.sequences % options.rows or options.sequences % GROUP:
        parser.error(f"--sequences is a multiple of --rows and of {GROUP}")
    return options


def main() -> int:
    """Measure and print the row."""
    options = _options()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory(prefix="trl-step-") as folder:
        model = Path(folder) / "model"
        config = make_model(options.size, model, dtype, device)
        samples = made_samples(options.sequences, options.mean, options.longest, config.vocab_size)
        peak = peak_flops(device, dtype)
        seconds, memory = measure(model, samples, options)
    lengths = [len(each.prompt_ids) + len(each.completion_ids) for each in samples]
    body, head = forward_flops(config, lengths, sum(len(each.completion_ids) for each in samples))
    actor, _, reference = PASSES["grpo"]
    widest = max(len(each.prompt_ids) for each in samples) + max(len(each.completion_ids) for each in samples)
    name = f"TRL's grpo, {options.rows} rows at once"
    useful = sum(lengths) / (widest * len(samples))
    flops = 3 * (body + head)
    row = Figures(name, sum(lengths), min(seconds), (actor + reference) * (body + head), flops, memory, useful)
    print(row.line(peak), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
