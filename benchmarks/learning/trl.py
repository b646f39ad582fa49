"""TRL's trainers on the sums, from the same start weights, with the same batch, budget and learning rate.

    python -m venv FOLDER && FOLDER/bin/pip install trl==1.16.0 torch transformers openai httpx
    FOLDER/bin/python -m benchmarks.learning.trl grpo --seed 0 --start FOLDER/start/sums-0

An environment of its own, because nothing of it is needed to run tuneloop. GRPO and RLOO sample for themselves; DPO,
KTO and SFT learn from the replies of `benchmarks.learning.offline`, as our methods of these names do there.
Prints one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from benchmarks.learning.offline import Row, pairs, rows
from benchmarks.learning.play import EVALUATED, Player
from examples.sums.task import Sum, judge
from examples.tasks.dialogue import forever
from examples.tasks.methods import BATCH, BETAS, GROUP, LR
from examples.tasks.sums import Sums
from examples.tasks.warmup import prompt_ids

_MINI_BATCHES = 2
_ONLINE = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
_OFFLINE = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "sft": (SFTTrainer, SFTConfig)}


def main() -> int:
    """Train once and print how it went."""
    options = _options()
    torch.set_num_threads(1)
    words = AutoTokenizer.from_pretrained(options.start)
    model = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    before = _measure(model, words, options.seed, EVALUATED)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer, curve = (_online if options.method in _ONLINE else _offline)(options, model, words, folder)
        trainer.train()
    model = trainer.model.eval()
    line = {
        "trainer": "trl",
        "method": options.method,
        "task": "sums",
        "seed": options.seed,
        "samples": options.samples,
        "lr": options.lr,
        "before": before,
        "after": _measure(model, words, options.seed, EVALUATED),
        "cpu_s": round(time.process_time() - started, 1),
        "curve": curve,
    }
    print(json.dumps(line))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=[*_ONLINE, *_OFFLINE])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--offline", type=Path, help="the replies that dpo, kto and sft learn from")
    return parser.parse_args()


def _measure(model: PreTrainedModel, words: PreTrainedTokenizerFast, seed: int, runs: int) -> float:
    return Player(Sums(), model, words, seed=seed + 7000).evaluate(seed=seed + 3000, runs=runs)


def _arguments(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Arguments of all trainers; one optimiser step uses half a batch, as ours."""
    return {
        "output_dir": folder,
        "learning_rate": options.lr,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "per_device_train_batch_size": BATCH // _MINI_BATCHES,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "seed": options.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _online(
    options: argparse.Namespace, model: PreTrainedModel, words: PreTrainedTokenizerFast, folder: str
) -> tuple[Any, list[list[float]]]:
    task, curve = Sums(), list[list[float]]()
    asked: list[Sum] = list(islice(forever(task, options.seed), options.samples // GROUP))
    prompts = [words.decode(prompt_ids(task, words, [{"role": "user", "content": each.question}])) for each in asked]
    data = Dataset.from_list(
        [
            {"prompt": prompt, "left": each.left, "right": each.right}
            for prompt, each in zip(prompts, asked, strict=True)
        ]
    )
    kind, config = _ONLINE[options.method]
    trainer = kind(
        model=model,
        args=config(
            **_arguments(options, folder),
            max_steps=options.samples // BATCH * _MINI_BATCHES,
            steps_per_generation=_MINI_BATCHES,
            num_generations=GROUP,
            max_completion_length=task.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
        ),
        reward_funcs=_rewards(curve),
        train_dataset=data,
        processing_class=words,
    )
    return trainer, curve


def _rewards(curve: list[list[float]]) -> Callable[..., list[float]]:
    """The judge, which also writes the curve: [samples, mean reward] after each batch."""

    def rewards(completions: Sequence[str], left: Sequence[int], right: Sequence[int], **_: object) -> list[float]:
        given = [judge(Sum(a, b), said) for said, a, b in zip(completions, left, right, strict=True)]
        curve.append([(curve[-1][0] if curve else 0) + len(given), sum(given) / len(given)])
        return given

    return rewards


def _offline(
    options: argparse.Namespace, model: PreTrainedModel, words: PreTrainedTokenizerFast, folder: str
) -> tuple[Any, list[list[float]]]:
    replies = rows(options.offline)[: options.samples]
    kind, config = _OFFLINE[options.method]
    common = _arguments(options, folder)
    more: dict[str, Any] = {"max_length": None, "disable_dropout": False}
    if options.method == "dpo":
        data = list(_of_pairs(replies, words))
        common["per_device_train_batch_size"] //= 2  # a pair is two replies
    elif options.method == "kto":
        data = [{**_of(each, words), "label": each.reward >= 0.5} for each in replies]
    else:
        more = {"max_length": None, "completion_only_loss": True}
        data = [_of(each, words) for each in replies if each.reward >= 0.5]
    trainer = kind(
        model=model,
        args=config(**common, **more),
        train_dataset=Dataset.from_list(data),
        processing_class=words,
    )
    return trainer, []


def _of(row: Row, words: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {"prompt": words.decode(row.prompt_ids), "completion": _text(row, words)}


def _of_pairs(replies: Sequence[Row], words: PreTrainedTokenizerFast) -> Iterator[dict[str, Any]]:
    for chosen, rejected in pairs(replies):
        yield {
            "prompt": words.decode(chosen.prompt_ids),
            "chosen": _text(chosen, words),
            "rejected": _text(rejected, words),
        }


def _text(row: Row, words: PreTrainedTokenizerFast) -> str:
    """The reply without its end, which TRL appends."""
    return words.decode([each for each in row.completion_ids if each != words.eos_token_id])


if __name__ == "__main__":
    sys.exit(main())
