"""The start models: what is learnt in a lesson, and that a run's prompts extend each other."""

import random

import pytest
import torch

from examples.tasks import warmup
from examples.tasks.calculator import Calculator, Sequel
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


def test_a_few_steps_of_warming_up_bring_a_right_reply_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Sums()
    monkeypatch.setattr(warmup, "CLEAN_STEPS", 6)
    monkeypatch.setattr(warmup, "NOISY_STEPS", 1)
    model, words = warmup.build(0)
    right = [warmup.lesson(task, words, each, None) for each in random.Random(0).sample(list(task.questions()), 8)]
    before = warmup.share_right(model, words, right)
    after = warmup.warm_up(task, model, words, seed=0)
    assert after > before
