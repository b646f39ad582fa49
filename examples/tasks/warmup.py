"""Makes the model that a task starts from: it knows what replies look like, and about 30 % of them are right."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.sums import model as sums_model
from examples.tasks.dialogue import Message, Task, text_of
from tuneloop.cli.options import with_progress

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
#: First only right conversations; then as many with slips as bring it down to about what the teacher gets right.
CLEAN_STEPS, NOISY_STEPS, BATCH = 300, 100, 32
PEAK_LR, LR_WARMUP_STEPS = 3e-3, 20
_IGNORED = -100


class Lesson(NamedTuple):
    """A conversation as tokens; `labels` are the next tokens where the model speaks, else ignored."""

    ids: Tensor
    labels: Tensor


def build(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The demo's model and tokenizer, with a chat template that is short about tools."""
    model, words = sums_model.build(seed)
    words.chat_template = CHAT_TEMPLATE.read_text()
    return model, words


def warm_up(
    task: Task, model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, *, seed: int, slips: bool = True
) -> float:
    """Train on right conversations, then, with `slips`, on ones with such; returns the chance that a run is right."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, fused=True)
    questions, steps = task.questions(), CLEAN_STEPS + NOISY_STEPS
    for step in with_progress(range(steps), f"teaching {task.name}", step=1):
        slip = chance if slips and step >= CLEAN_STEPS else None
        lessons = [lesson(task, words, each, slip) for each in chance.choices(questions, k=BATCH)]
        optimizer.param_groups[0]["lr"] = PEAK_LR * min((step + 1) / LR_WARMUP_STEPS, 1 - step / steps)
        optimizer.zero_grad()
        losses = _losses(model, words, lessons)
        (losses.sum() / (losses != 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return share_right(model, words, [lesson(task, words, each, None) for each in questions[:: len(questions) // 60]])


@torch.no_grad()
def share_right(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, right: Sequence[Lesson]) -> float:
    """The mean chance that the model says just what the right lessons say."""
    return float(_losses(model, words, right).sum(dim=1).neg().exp().mean())


def lesson(task: Task, words: PreTrainedTokenizerFast, question: Any, slip: random.Random | None) -> Lesson:
    """The teacher's conversation about the question as one row of tokens: each prompt continues the last."""
    dialogue, ids, spoken = task.dialogue(question), list[int](), list[bool]()
    messages = next(dialogue)
    for reply in task.replies(question, slip):
        prompt, said = prompt_ids(task, words, messages), [*words(text_of(reply)).input_ids, words.eos_token_id]
        spoken += [False] * (len(prompt) - len(ids)) + [True] * len(said)
        ids = prompt + said
        try:
            messages = dialogue.send(reply)
        except StopIteration:
            break
    labels = [after if says else _IGNORED for after, says in zip(ids[1:], spoken[1:], strict=True)]
    return Lesson(torch.tensor(ids), torch.tensor([*labels, _IGNORED]))


def prompt_ids(task: Task, words: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[int]:
    """The messages as the engine shows them to the model."""
    text = words.apply_chat_template(
        list(messages), tools=list(task.tools) or None, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = words(text).input_ids
    return ids


def _losses(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, lessons: Sequence[Lesson]) -> Tensor:
    """The loss of each token that the model speaks (nats), one row a lesson, 0 elsewhere."""
    ids = pad_sequence([each.ids for each in lessons], batch_first=True, padding_value=words.pad_token_id)
    labels = pad_sequence([each.labels for each in lessons], batch_first=True, padding_value=_IGNORED)
    logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
