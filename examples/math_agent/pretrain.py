"""Pre-train a model of any size on problems made here, until it gets about half of them right; then tune it.

python -m examples.math_agent.pretrain --parameters 100M --to MODEL                # minutes on a GPU
python -m examples.math_agent.main --model MODEL --gpu --gpu-share 0.3 --rate 4e-5

The problems have two to four operations. Late lessons have the teacher's slips, which the tuning takes away.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from examples.math_agent.world import Problems
from examples.sums.model import save
from examples.tasks.warmup import Lesson
from examples.worlds import model as models
from examples.worlds.schooling import Schooling
from examples.worlds.warmup import EARLY_SLIPS, learn, lessons, share_right

MOST = 4
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
_CHUNK = 64
#: Steps between two evaluations.
_LOOK_STEPS, _LATE_LOOK_STEPS = 250, 25


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model and save it as a Hugging Face folder, in bfloat16 if it was made on a GPU."""
    options = _options(arguments)
    gpu = torch.cuda.is_available()
    began, problems = time.monotonic(), Problems(most=MOST, number=options.problems)
    words = models.tokenizer(problems)
    model = models.build(words, **size_of(options.parameters), seed=options.seed)
    print(f"{models.parameters(model) / 1e6:.1f} M parameters, {len(words)} tokens", flush=True)

    schooling = Schooling(
        early_steps=options.early_steps,
        late_steps=options.late_steps,
        goal=options.goal,
        batch=options.batch,
        rate=options.rate,
        late_rate=options.rate / 6,
        rising_steps=100,
    )
    with Pretraining(words, options) as pretraining:
        learner = model.to("cuda" if gpu else "cpu")
        optimizer = torch.optim.AdamW(learner.parameters(), lr=options.rate, betas=(0.9, 0.98), fused=True)
        for step, batch in pretraining.batches(schooling, began):
            loss = learn(batch, learner, words, optimizer, schooling.rate_at(step))
            if (step + 1) % (_LOOK_STEPS if step < options.early_steps else _LATE_LOOK_STEPS) == 0:
                right = share_right(problems, learner, words, options.seed)
                said = f"step {step + 1}: loss {float(loss):.4f}, {right:.3f} right"
                print(f"{said}, {time.monotonic() - began:.0f} s", flush=True)
                if step >= options.early_steps and right <= schooling.goal:
                    break
    save(model.to("cpu", torch.bfloat16 if gpu else torch.float32), words, options.to)
    (options.to / "taught.json").write_text(json.dumps({"parameters": models.parameters(model)}) + "\n")
    print(f"{options.to}: {time.monotonic() - began:.0f} s", flush=True)


class Pretraining:
    """Writes lessons in processes, since a GPU learns faster than one process writes."""

    def __init__(self, words: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
        self._options = options
        # Forked before CUDA is used by them, and they never use it.
        self._pool = multiprocessing.get_context("fork").Pool(options.processes, _begin, (words, options.problems))

    def __enter__(self) -> "Pretraining":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()

    def batches(self, schooling: Schooling, began: float) -> Iterator[tuple[int, list[Lesson]]]:
        """Steps from 0, each with its lessons; the first three quarters of the time have correct ones only."""
        stages = (
            (EARLY_SLIPS, 0, schooling.early_steps, 0.75),
            (1.0, schooling.early_steps, schooling.late_steps, 1.0),
        )
        for slips, first, steps, share in stages:
            chunks = -(-steps * schooling.batch // _CHUNK)
            orders = ((f"{self._options.seed}/{slips}/{number}", slips) for number in range(chunks))
            written = (_tensors(row) for rows in self._pool.imap(_write, orders) for row in rows)
            for step in range(first, first + steps):
                if time.monotonic() - began > share * self._options.seconds:
                    break
                if batch := list(islice(written, schooling.batch)):
                    yield step, batch


def size_of(parameters: str) -> dict[str, int]:
    """The width and depth of a model of about so many parameters, such as 100M.

    >>> size_of("100M")
    {'hidden': 768, 'layers': 15}
    """
    wanted = float(parameters[:-1]) * _UNITS[parameters[-1].upper()]
    hidden = next(each for each in range(64, 8192, 64) if 12 * each * each * max(2, each // 50) >= wanted)
    return {"hidden": hidden, "layers": max(2, hidden // 50)}


def _begin(words: PreTrainedTokenizerFast, problems: int) -> None:
    global _words, _problems
    _words, _problems = words, Problems(most=MOST, number=problems)


def _write(order: tuple[str, float]) -> list[tuple[list[int], list[int]]]:
    seed, slips = order
    chance = random.Random(seed)
    asked = chance.choices(_problems.questions(), k=_CHUNK)
    made = [
        each for one in asked for each in lessons(_problems, _words, one, chance if chance.random() < slips else None)
    ]
    return [(each.ids.tolist(), each.labels.tolist()) for each in made]


def _tensors(row: tuple[list[int], list[int]]) -> Lesson:
    return Lesson(torch.tensor(row[0]), torch.tensor(row[1]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.math_agent.pretrain")
    parser.add_argument("--parameters", default="100M")
    parser.add_argument("--to", type=Path, required=True, help="folder of the model")
    parser.add_argument("--early-steps", type=int, default=1000)
    parser.add_argument("--late-steps", type=int, default=300, help="at most")
    parser.add_argument("--goal", type=float, default=0.5, help="share of right answers at which the late ones end")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, without the last look and saving")
    parser.add_argument("--batch", type=int, default=128, help="conversations of a step")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
