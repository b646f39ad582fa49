"""Our methods in one process: replies sampled by the trainer's own model, and the trainer's learner, step by step.

No engine, no HTTP and no database, so that a run takes seconds: for tuning, and beside TRL. What the loop does to a
batch (which samples are left out, and that a step waits until enough are left) is done here too.
"""

import dataclasses
import random
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.learning.offline import Row, rows, write
from benchmarks.learning.plan import Wanted
from benchmarks.learning.play import Player, Run
from examples.tasks.dialogue import Task, forever, text_of
from examples.tasks.methods import BATCH, GROUP, METHODS
from examples.tasks.rating import Rater
from examples.tasks.start import teacher_of
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.algorithms.terms import Moments
from tuneloop.trainer.batches.rendered_lines import MixedFile
from tuneloop.trainer.batches.selection import select
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.teacher.teacher import LocalTeacher


def settings_of(wanted: Wanted, task: Task, start: Path) -> Settings:
    """The settings that the trainer would read from a file."""
    changes = list(wanted.changes)
    if wanted.offline and wanted.method == "sft":  # no correction
        changes.append("sft.targets=replies")
    taught_by = teacher_of(start.parent.parent, task.name, wanted.seed).absolute()
    method = METHODS[wanted.method].settings(task.name, changes, teacher=taught_by)
    return Settings.model_validate(
        {
            "mode": "train",
            "name": "learning",
            "checkpoint_root_dir": str(start.parent),
            "model": {
                "model_path": str(start),
                "max_model_len": 512,
                "temperature": 1.0,
                "lora": {"rank": wanted.lora},
            },
            "cluster": {"node_num": 1, "gpu_per_node": 0},
            "trainer": {"device": "cpu", "dtype": "float32", "seed": wanted.seed},
            "algorithm": method["algorithm"],
            "explorer": {"capture": {"logprobs": "all" if wanted.captured == 1 else "share", "share": wanted.captured}},
            "buffer": {**method["buffer"], "trainer_input": {"experience_buffer": {"name": "learning"}}},
        }
    )


def learn(wanted: Wanted, task: Task, start: Path, replies: Path | None = None) -> dict[str, Any]:
    """Make the run and report it; with `replies` it learns from those and samples nothing."""
    torch.set_num_threads(1)
    settings = settings_of(wanted, task, start)
    learner = snapshot.load(settings, None)
    learner.mixed = MixedFile.of(settings)
    if taught_by := settings.algorithm.distill.teacher_path:
        learner.teacher = LocalTeacher(settings, taught_by)
    words = AutoTokenizer.from_pretrained(start)
    before = _measure(task, learner, words, wanted.seed)
    cpu, wall = time.process_time(), time.monotonic()
    source = _offline(rows(replies)) if replies else Online(wanted, task, learner, words)
    steps, curve = _Steps(learner, settings, raw=wanted.raw), list[list[float]]()
    for samples, right, sampled in source:
        steps.take(samples)
        curve.append([sampled, round(right, 4)])
        if sampled >= wanted.samples:
            break
    cpu_s = time.process_time() - cpu
    return {
        "trainer": "tuneloop",
        "method": wanted.method,
        "task": task.name,
        "seed": wanted.seed,
        "samples": wanted.samples,
        "before": before,
        "after": _measure(task, learner, words, wanted.seed),
        "steps": learner.steps,
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(time.monotonic() - wall, 1),
        "metrics": {name: round(value, 5) for name, value in steps.last.items()},
        "curve": curve,
    }


def learn_file(wanted: Wanted, task: Task, start: Path, folder: Path) -> Path:
    """The start weights after a file of right answers was learnt three times over by `sft`, as a model folder."""
    torch.set_num_threads(1)
    told = dataclasses.replace(wanted, method="sft", lora=0, changes=(), late=0, flip=0.0, offset=0.0, coin=False)
    settings = settings_of(told, task, start)
    learner, words = snapshot.load(settings, None), AutoTokenizer.from_pretrained(start)
    steps = _Steps(learner, settings, raw=False)
    file = [samples for samples, _, _ in islice(Online(told, task, learner, words), wanted.file // BATCH)]
    for samples in file * 3:
        steps.take(samples)
    shutil.copytree(start, folder, dirs_exist_ok=True)
    learner.actor.network.save_pretrained(folder)
    return folder


class Online:
    """Batches sampled from the learner as it is now, with the rewards that are wanted."""

    def __init__(self, wanted: Wanted, task: Task, learner: Learner, words: PreTrainedTokenizerFast) -> None:
        self._wanted, self._task, self._learner = wanted, task, learner
        self._player = Player(task, learner.actor.network, words, seed=wanted.seed)
        low, high = task.reward_range
        self._rater = Rater(low=low, high=high, flip=wanted.flip, offset=wanted.offset, coin=wanted.coin)
        self._chance = random.Random(f"rewards {wanted.seed}")  # not those by which the questions are drawn
        self._captures = random.Random(f"captures {wanted.seed}")
        self._ids, self._asked = count(1), count(1)

    def __iter__(self) -> Iterator[tuple[list[Sample], float, int]]:
        """(samples, share of right runs, replies sampled so far) without end."""
        runs = METHODS[self._wanted.method].runs
        asked, sampled = forever(self._task, self._wanted.seed), 0
        waiting: deque[tuple[list[Sample], float]] = deque()
        while True:
            questions = [each for each in islice(asked, BATCH // runs) for _ in range(runs)]
            played = self._player.play(questions)
            rights = sum(run.verdict.right for run in played) / len(played)
            waiting.append((list(self._samples(played, runs)), rights))
            sampled += sum(len(run.replies) for run in played)
            if len(waiting) > self._wanted.late:
                yield *waiting.popleft(), sampled

    def _samples(self, played: Sequence[Run], runs: int) -> Iterator[Sample]:
        for number, run in enumerate(played):
            if number % runs == 0:
                group = next(self._asked)
            reward, version = self._rater.reward(run.verdict, self._chance), self._learner.steps
            better = self._better(run.question)
            for said in run.replies:
                row = Row(f"{run.text}#{group}", said.prompt, said.ids, said.logprobs, reward)
                sample = sample_of(row, number=next(self._ids), run_id=str(number), group=group)
                if self._captures.random() >= self._wanted.captured:
                    sample = replace(sample, logprobs=np.full_like(sample.logprobs, np.nan))
                yield replace(sample, version_min=version, version_max=version, demonstration=better)

    def _better(self, question: Any) -> str | None:
        """The correction of a reply, if the method uses them."""
        if METHODS[self._wanted.method].feedback != "demonstration":
            return None
        *_, last = map(text_of, self._task.replies(question, None))
        return last


def write_replies(file: Path, task: Task, start: Path, *, seed: int, samples: int) -> None:
    """Replies of the start weights with their rewards, GROUP to a question, unless they are there already."""
    if file.exists() and len(rows(file)) >= samples:
        return
    network = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    player = Player(task, network, AutoTokenizer.from_pretrained(start), seed=seed + 9000)
    questions = [each for each in islice(forever(task, seed + 9000), samples // GROUP) for _ in range(GROUP)]
    played = [run for begin in range(0, samples, BATCH) for run in player.play(questions[begin : begin + BATCH])]
    write(
        file,
        [
            Row(f"{run.text}#{number // GROUP}", said.prompt, said.ids, said.logprobs, run.verdict.reward)
            for number, run in enumerate(played)
            for said in run.replies
        ],
    )


def sample_of(row: Row, *, number: int, run_id: str, group: int) -> Sample:
    """The row as the trainer would lease it."""
    return Sample(
        id=number,
        prompt_ids=np.asarray(row.prompt_ids, np.int32),
        completion_ids=np.asarray(row.completion_ids, np.int32),
        logprobs=np.asarray(row.logprobs, np.float32),
        reward=row.reward,
        temperature=1.0,
        version_min=0,
        version_max=0,
        tenant="default",
        task_id=row.task_id,
        run_id=run_id,
        group_id=group,
        rewarded_at=0.0,
        committed_at=0.0,
    )


def _offline(replies: Sequence[Row]) -> Iterator[tuple[list[Sample], float, int]]:
    groups = {task_id: number for number, task_id in enumerate(dict.fromkeys(row.task_id for row in replies))}
    for begin in range(0, len(replies), BATCH):
        part = replies[begin : begin + BATCH]
        samples = [
            sample_of(row, number=begin + i, run_id=str(begin + i), group=groups[row.task_id])
            for i, row in enumerate(part, 1)
        ]
        yield samples, sum(row.reward for row in part) / len(part), begin + len(part)


class _Steps:
    """The trainer's part: drops unusable rows, and steps when a batch is full."""

    def __init__(self, learner: Learner, settings: Settings, *, raw: bool) -> None:
        self._learner, self._settings, self._raw = learner, settings, raw
        self._recomputation = Recomputation(settings, Ledger.of(settings), MicroBatch(settings))
        self._held: list[Sample] = []
        self.last: dict[str, float] = {}

    def take(self, samples: Sequence[Sample]) -> None:
        kept, _ = select(samples, self._settings, vocabulary=self._learner.actor.vocabulary)
        # waiting rows were recomputed on arrival, with the weights that sampled them
        self._held += self._recomputation.fill(kept, self._learner, version=self._learner.steps)[0]
        if len(self._held) >= self._settings.buffer.train_batch_size:
            if self._raw:
                self._learner.baselines = {"reinforce": Moments(0.0, 0.0, 1.0)}
            self.last = {**self._learner.step(self._held), **self._recomputation.take_figures()}
            self._held = []


def _measure(task: Task, learner: Learner, words: PreTrainedTokenizerFast, seed: int) -> float:
    return Player(task, learner.actor.network, words, seed=seed + 7000).evaluate(seed=seed + 3000)
