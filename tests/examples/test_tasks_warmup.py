"""The start models: what is learnt in a lesson, and that a run's prompts extend each other."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.sums import warmup as sums_warmup
from examples.sums.task import Sum
from examples.tasks import start, warmup
from examples.tasks.calculator import Calculator, Sequel
from examples.tasks.dialogue import Task, call_of
from examples.tasks.sums import Sums


def test_a_lesson_labels_what_the_model_says_and_nothing_else() -> None:
    _, words = warmup.build(0)
    lesson = warmup.lesson(Calculator(), words, Sequel(3, "+", 4, "*", 5), None)
    labels = lesson.labels[lesson.labels >= 0]
    assert words.decode(labels) == (
        '<tool_call>\n{"name": "calc", "arguments": {"expr": "3+4"}}\n</tool_call><|im_end|>'
        '<tool_call>\n{"name": "calc", "arguments": {"expr": "7*5"}}\n</tool_call><|im_end|>'
        "35<|im_end|>"
    )
    said = lesson.labels[:-1] >= 0
    assert torch.equal(lesson.labels[:-1][said], lesson.ids[1:][said])
    assert words.decode(lesson.ids).count("<|im_start|>tool\n") == 2


def test_each_prompt_of_a_run_goes_on_where_the_last_reply_ended() -> None:
    _, words = warmup.build(0)
    task, question = Calculator(), Sequel(3, "+", 4, "*", 5)
    dialogue = task.dialogue(question)
    first = warmup.prompt_ids(task, words, next(dialogue))
    said = [*words(warmup.text_of(call_of("calc", expr="3+4"))).input_ids, words.eos_token_id]
    second = warmup.prompt_ids(task, words, dialogue.send(call_of("calc", expr="3+4")))
    assert second[: len(first) + len(said)] == first + said


def test_a_few_steps_of_warming_up_bring_a_right_reply_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Sums()
    monkeypatch.setattr(warmup, "CLEAN_STEPS", 6)
    monkeypatch.setattr(warmup, "NOISY_STEPS", 1)
    model, words = warmup.build(0)
    right = [warmup.lesson(task, words, each, None) for each in random.Random(0).sample(list(task.questions()), 8)]
    before = warmup.share_right(model, words, right)
    after = warmup.warm_up(task, model, words, seed=0)
    assert after > before


def test_a_teacher_is_made_once_and_sees_no_slips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer, lesson, slips = sums_warmup._answer, warmup.lesson, list[object]()

    def answered(asked: Sum, noisy: bool, chance: random.Random) -> str:
        slips.append(noisy or None)
        return answer(asked, noisy, chance)

    def taught(task: Task, words: Any, question: Any, slip: random.Random | None) -> warmup.Lesson:
        slips.append(slip)
        return lesson(task, words, question, slip)

    for name, value in {"CLEAN_STEPS": 2, "_answer": answered}.items():
        monkeypatch.setattr(sums_warmup, name, value)
    for name, value in {"CLEAN_STEPS": 2, "NOISY_STEPS": 1, "lesson": taught}.items():
        monkeypatch.setattr(warmup, name, value)
    for task in ("sums", "calculator"):
        made = start.teacher(tmp_path, task, 0)
        assert made == start.teacher_of(tmp_path, task, 0)
        weights = (made / "model.safetensors").stat().st_mtime_ns
        assert (start.teacher(tmp_path, task, 0) / "model.safetensors").stat().st_mtime_ns == weights
    assert set(slips) == {None}
