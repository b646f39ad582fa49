"""The losses of our fine-tuning jobs beside those of TRL's SFT and DPO: same file, model, adapter, order and settings.

    python -m venv FOLDER && FOLDER/bin/pip install trl==1.16.0 peft torch transformers datasets
    PYTHONPATH=build/links:. FOLDER/bin/python -m benchmarks.learning.job_parity sft --out FOLDER/sft

Ours is `tuneloop finetune` in float32 on the CPU: 200 lines, 2 epochs, batches of 8, 50 steps. TRL begins with the
adapter that ours began with, and reads the lines in the order in which the ledger says that ours were taken. Both:
AdamW with betas 0.9 and 0.999, epsilon 1e-8, no weight decay, a constant learning rate, gradients clipped to norm 1;
sft's loss is the mean over the answers' tokens of a batch, their ends included; dpo's the mean over pairs, of sums over
tokens, with beta 0.1. With `--items`, the start weights and both answer so many sums, of two numbers below 100 each,
sampled with one seed: neither the file nor the start weights' lessons have them. Prints one JSON object, with the
difference of the shares of right answers, ours less TRL's, and the half width of its paired interval of 95 %.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.learning.play import Player
from examples.sums.model import save
from examples.sums.task import Sum
from examples.tasks.sums import Sums
from examples.tasks.warmup import build, warm_up
from tuneloop.shared.finetuning.job_plan import plan_job
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.trainer.models.lora import AdaptedActor

_LINES, _EPOCHS, _BATCH, _LR = 200, 2, 8, 1e-3

#: All sums in an order of chance. The first of them are taught; the others are held out.
_SUMS = random.Random(3).sample([Sum(left, right) for left in range(100) for right in range(100)], 10_000)
_TAUGHT = 4_500


class WiderSums(Sums):
    """Sums of numbers below 100, of which some are held out."""

    def questions(self) -> list[Sum]:
        """The trained questions."""
        return _SUMS[:_TAUGHT]


def main() -> int:
    """Train twice, and print how far the losses are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["sft", "dpo"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = options.out.absolute()
    out.mkdir(parents=True)
    model, words = build(0)
    for seed in range(3):
        warm_up(WiderSums(), model, words, seed=seed, slips=seed == 2)
    save(model, words, out / "model")
    lines = _write_file(out / "lines.jsonl", options.method)
    config = _write_settings(out)
    command = ["finetune", str(out / "lines.jsonl"), "--config", str(config), "--method", options.method]
    command += ["--epochs", str(_EPOCHS), "--batch-size", str(_BATCH), "--lr-multiplier", "1", "--json"]
    command += ["--validation", str(out / "lines.jsonl")]
    program = [sys.executable, "-c", "from tuneloop.cli.main import main; main()", *command]
    told = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
    settings = load_settings(config, [])
    ledger = Ledger.of(settings)
    events = reversed(ledger.jobs.events(told["job"], limit=1000))
    ours = [each.data["train_loss"] for each in events if each.data and "train_loss" in each.data]
    choices = experiences.select().where(experiences.c.choice == 0).order_by(experiences.c.id)
    order = [int(row.msg_id.split(":")[1]) - 1 for row in ledger.transactions.read(choices)]
    kind = "dpo" if options.method == "dpo" else "supervised"
    asked = {"n_epochs": _EPOCHS, "batch_size": _BATCH, "learning_rate_multiplier": 1}
    plan = plan_job(settings, kind, asked, lines=len(lines), seed=settings.trainer.seed)
    actor = AdaptedActor.load(settings_of_policy(settings, plan.options), settings.model.model_path)
    actor.save(out / "adapter", actor.tensors())
    theirs, trained = _train_with_trl(options.method, out, [lines[at] for at in order])
    result = {
        "method": options.method,
        "steps": len(ours),
        "furthest_apart": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        "ours": [ours[0], ours[-1]],
        "trl": [theirs[0], theirs[-1]],
    }
    if options.items:
        version = ledger.versions.get(told["version"])
        assert version is not None
        base = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        served: Any = PeftModel.from_pretrained(base, version.path / "actor").eval()
        start = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
        right = [_rights(each, words, _SUMS[_TAUGHT:][: options.items]) for each in (start, served, trained)]
        apart = [ours - theirs for ours, theirs in zip(right[1], right[2], strict=True)]
        result |= {f"{name}_right": fmean(each) for name, each in zip(("start", "our", "trl"), right, strict=True)}
        width = 1.96 * pstdev(apart) / len(apart) ** 0.5
        result |= {"items": len(apart), "difference": fmean(apart), "half_width": width}
    ledger.close()
    print(json.dumps(result))
    return 0


def _rights(model: Any, words: Any, asked: list[Sum]) -> list[float]:
    """For each sum whether a sampled answer is right."""
    player = Player(WiderSums(), model, words, seed=7)
    return [float(run.verdict.right) for at in range(0, len(asked), 250) for run in player.play(asked[at : at + 250])]


def _write_file(path: Path, method: str) -> list[dict[str, Any]]:
    """The lines: sums with their answers, or with a right and a wrong one."""
    chance, lines = random.Random(5), []
    for asked in chance.sample(_SUMS[:_TAUGHT], _LINES):
        question = [{"role": "user", "content": asked.question}]
        right, wrong = (
            {"role": "assistant", "content": str(each)}
            for each in (asked.answer, (int(asked.answer) + chance.randrange(1, 199)) % 199)
        )
        lines.append(
            {"input": {"messages": question}, "preferred_output": [right], "non_preferred_output": [wrong]}
            if method == "dpo"
            else {"messages": [*question, right]}
        )
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return lines


def _write_settings(out: Path) -> Path:
    tree = {
        "mode": "train",
        "checkpoint_root_dir": str(out / "checkpoints"),
        "model": {"model_path": str(out / "model"), "lora": {"rank": 8, "alpha": 16}},
        "algorithm": {"algorithm_type": "reinforce", "optimizer": {"lr": _LR}},
        "trainer": {"device": "cpu", "dtype": "float32"},
    }
    (out / "x.yaml").write_text(json.dumps(tree))  # JSON is YAML
    return out / "x.yaml"


def _train_with_trl(method: str, out: Path, lines: list[dict[str, Any]]) -> tuple[list[float], Any]:
    """The losses, and the model that came out."""
    words = AutoTokenizer.from_pretrained(out / "model")
    base = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, out / "adapter", is_trainable=True)
    losses: list[float] = []
    kind, config = (DPOTrainer, DPOConfig) if method == "dpo" else (SFTTrainer, SFTConfig)

    class InOrder(kind):  # type: ignore[misc,valid-type]
        """Takes rows in order, and keeps the losses unrounded."""

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **how: Any) -> Any:
            found = super().compute_loss(*args, **how)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    def prompt(messages: list[dict[str, Any]]) -> str:
        return str(words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    if method == "dpo":
        rows = [
            {
                "prompt": prompt(each["input"]["messages"]),
                "chosen": each["preferred_output"][0]["content"],
                "rejected": each["non_preferred_output"][0]["content"],
            }
            for each in lines
        ]
        more: dict[str, Any] = {"beta": 0.1}
    else:
        rows = [
            {"prompt": prompt(each["messages"][:-1]), "completion": each["messages"][-1]["content"]} for each in lines
        ]
        more = {"completion_only_loss": True}
    arguments = config(
        output_dir=str(out / "trl"),
        learning_rate=_LR,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        per_device_train_batch_size=_BATCH,
        num_train_epochs=1,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=words)
    trainer.train()
    return losses, trainer.model.eval()


if __name__ == "__main__":
    sys.exit(main())
