"""Teaches a model of this process a world's dialogues: first correct ones, then with the teacher's slips.

The result is a start for reinforcement: a model that could do better than it does.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tasks.dialogue import Task, text_of
from examples.tasks.warmup import Lesson, prompt_ids
from examples.worlds.schooling import Schooling
from tuneloop.cli.options import with_progress

#: The share of the early conversations that have slips: what comes after a slip must be known, too.
EARLY_SLIPS = 0.3
_IGNORED = -100
#: Runs of the teacher of each kind; late steps between two evaluations, and the runs of each.
_MOST_RUNS, _LOOK_STEPS, _MEASURED_RUNS = 4096, 20, 128


def teach(
    task: Task, model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, schooling: Schooling, *, seed: int
) -> float:
    """Train `model` on the teacher's dialogues; the share of its runs that succeed afterwards."""
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schooling.rate, betas=(0.9, 0.98), fused=True)
    step = 0
    for slips, steps in ((EARLY_SLIPS, schooling.early_steps), (1.0, schooling.late_steps)):
        # on a GPU, writing a lesson takes longer than learning it, so most are repeated
        asked = chance.choices(task.questions(), k=min(_MOST_RUNS, steps * schooling.batch))
        runs = [lessons(task, words, each, chance if chance.random() < slips else None) for each in asked]
        for made in with_progress(range(1, steps + 1), f"teaching {task.name}, slips {slips:.0%}", step=1):
            batch = [row for run in chance.choices(runs, k=schooling.batch) for row in run]
            learn(batch, model, words, optimizer, schooling.rate_at(step))
            step += 1
            if slips == 1.0 and made % _LOOK_STEPS == 0 and share_right(task, model, words, seed) <= schooling.goal:
                break
    return share_right(task, model, words, seed)


def share_right(task: Task, model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, seed: int) -> float:
    """The share of the model's own runs that end right."""
    from benchmarks.learning.play import Player

    return Player(task, model, words, seed=seed).evaluate(seed=seed + 500, runs=_MEASURED_RUNS)


def learn(
    batch: Sequence[Lesson],
    model: Qwen3ForCausalLM,
    words: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> Tensor:
    """One step; its loss. On a GPU the arithmetic is bfloat16."""
    device = next(model.parameters()).device
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = _loss(model, words, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def lessons(task: Task, words: PreTrainedTokenizerFast, question: Any, slip: random.Random | None) -> list[Lesson]:
    """The teacher's run as rows of tokens; a prompt that continues another shares its row."""
    rows: list[tuple[list[int], list[bool]]] = []
    dialogue = task.dialogue(question)
    messages = next(dialogue)
    for reply in task.replies(question, slip):
        prompt, said = prompt_ids(task, words, messages), [*words(text_of(reply)).input_ids, words.eos_token_id]
        row = next((each for each in rows if prompt[: len(each[0])] == each[0]), None)
        if row is None:
            row = ([], [])
            rows.append(row)
        ids, is_reply = row
        is_reply += [False] * (len(prompt) - len(ids)) + [True] * len(said)
        ids[:] = prompt + said
        try:
            messages = dialogue.send(reply)
        except StopIteration:
            break
    return [_lesson(ids, is_reply) for ids, is_reply in rows]


def _lesson(ids: Sequence[int], is_reply: Sequence[bool]) -> Lesson:
    labels = [after if says else _IGNORED for after, says in zip(ids[1:], is_reply[1:], strict=True)]
    return Lesson(torch.tensor(ids), torch.tensor([*labels, _IGNORED]))


def _loss(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, batch: Sequence[Lesson]) -> Tensor:
    """The mean loss (nats) of the tokens that the model speaks."""
    device = next(model.parameters()).device
    ids = pad_sequence([each.ids for each in batch], batch_first=True, padding_value=words.pad_token_id).to(device)
    labels = pad_sequence([each.labels for each in batch], batch_first=True, padding_value=_IGNORED).to(device)
    logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED)
