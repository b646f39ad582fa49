"""A short supervised warm-up that leaves the model 30 % right: it knows what an answer looks like, but is not sure."""

import random
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.sums.task import ALL, Sum

#: First only right answers; then answers of which NOISY_RIGHT are right, until the model is no better than GOAL.
CLEAN_STEPS, MOST_NOISY_STEPS, BATCH = 250, 100, 64
NOISY_RIGHT, GOAL = 0.25, 0.3
PEAK_LR, NOISY_LR, LR_WARMUP_STEPS = 3e-3, 1e-4, 20
IGNORED = -100


def warm_up(
    model: Qwen3ForCausalLM,
    words: PreTrainedTokenizerFast,
    seed: int,
    on_step: Callable[[int, int], None],
    *,
    slips: bool = True,
) -> float:
    """Train `model` and return its chance of a right answer. `on_step(done, of)` gets the progress.

    Without `slips` it sees right answers only.
    """
    torch.set_num_threads(1)  # a matrix of this size gains nothing by a second one
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, fused=True)
    steps, share = CLEAN_STEPS + (MOST_NOISY_STEPS if slips else 0), 1.0
    for step in range(steps):
        noisy = step >= CLEAN_STEPS
        optimizer.param_groups[0]["lr"] = _lr(step)
        batch = [(asked, _answer(asked, noisy, chance)) for asked in chance.choices(ALL, k=BATCH)]
        optimizer.zero_grad()
        _loss(model, words, batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step + 1, steps)
        if noisy and (share := share_right(model, words)) <= GOAL:
            break
    return share if slips else share_right(model, words)


def share_right(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast) -> float:
    """The chance that a sampled answer is right, exactly, over all the sums."""
    with torch.no_grad():
        losses = _loss(model, words, [(asked, asked.answer) for asked in ALL])
    return float(losses.sum(dim=1).neg().exp().mean())


def _lr(step: int) -> float:
    rising, falling = (step + 1) / LR_WARMUP_STEPS, 1 - step / CLEAN_STEPS
    return max(PEAK_LR * min(rising, falling), NOISY_LR)


def _answer(asked: Sum, noisy: bool, chance: random.Random) -> str:
    return str(chance.randrange(19)) if noisy and chance.random() > NOISY_RIGHT else asked.answer


def _loss(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, batch: Sequence[tuple[Sum, str]]) -> torch.Tensor:
    """The loss of each token of the answers (nats), one row an answer; the prompts are all of one length."""
    prompts = [_prompt(words, asked) for asked, _ in batch]
    answers = [[*words(answer).input_ids, words.eos_token_id] for _, answer in batch]
    longest = max(map(len, answers))
    ids = torch.tensor(
        [p + a + [words.pad_token_id] * (longest - len(a)) for p, a in zip(prompts, answers, strict=True)]
    )
    labels = torch.tensor([a + [IGNORED] * (longest - len(a)) for a in answers])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def _prompt(words: PreTrainedTokenizerFast, asked: Sum) -> list[int]:
    turn = [{"role": "user", "content": asked.question}]
    return words(words.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)).input_ids
