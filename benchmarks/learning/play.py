"""Plays a task's dialogues against a model in this process, many at a time; the benchmark of learning samples so.

Nothing of tuneloop is imported here, so that the same code samples and measures for other trainers.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.tasks.dialogue import Dialogue, Message, Task, Verdict, forever, read
from examples.tasks.warmup import prompt_ids

EVALUATED = 1024
_AT_ONCE = 256


class SampledReply(NamedTuple):
    """One reply as it was sampled at temperature 1: `logprobs` (nats) has one number per id, the end included."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


class Run(NamedTuple):
    """One dialogue that was played: the question, what was asked first, the model's replies, and the verdict."""

    question: Any
    text: str
    replies: list[SampledReply]
    verdict: Verdict


class Player:
    """Plays `task` with the model `network`; `seed` is that of all its sampling."""

    def __init__(self, task: Task, network: PreTrainedModel, words: PreTrainedTokenizerFast, *, seed: int) -> None:
        self._task, self._network, self._words = task, network, words
        self._generator = torch.Generator(network.device).manual_seed(seed)

    def play(self, questions: Sequence[Any]) -> list[Run]:
        """One run of each question, in lockstep."""
        dialogues = [self._task.dialogue(question) for question in questions]
        said: list[list[SampledReply]] = [[] for _ in questions]
        verdicts: dict[int, Verdict] = {}
        waiting = [(i, next(dialogue)) for i, dialogue in enumerate(dialogues)]
        texts = [str(messages[-1]["content"]) for _, messages in waiting]
        while waiting:
            replies = self._sample([messages for _, messages in waiting])
            following = []
            for (i, _), reply in zip(waiting, replies, strict=True):
                said[i].append(reply)
                asked = self._next_messages(dialogues[i], reply)
                if isinstance(asked, Verdict):
                    verdicts[i] = asked
                else:
                    following.append((i, asked))
            waiting = following
        return [Run(question, texts[i], said[i], verdicts[i]) for i, question in enumerate(questions)]

    def evaluate(self, *, seed: int, runs: int = EVALUATED) -> float:
        """The share of runs that end right."""
        questions = list(islice(forever(self._task, seed), runs))
        played = [run for start in range(0, runs, _AT_ONCE) for run in self.play(questions[start : start + _AT_ONCE])]
        return sum(run.verdict.right for run in played) / runs

    def _next_messages(self, dialogue: Dialogue, reply: SampledReply) -> list[Message] | Verdict:
        ids = [each for each in reply.ids if each != self._words.eos_token_id]
        try:
            return dialogue.send(read(self._words.decode(ids)))
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict

    @torch.no_grad()
    def _sample(self, asked: Sequence[list[Message]]) -> list[SampledReply]:
        """A reply to each of the conversations."""
        prompts = [prompt_ids(self._task, self._words, messages) for messages in asked]
        longest = max(map(len, prompts))
        device = self._network.device
        ids = torch.tensor([[self._words.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]).to(
            device
        )
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(device)
        cache, positions = None, (real.cumsum(1) - 1).clamp(min=0)
        chosen, chances = list[Tensor](), list[Tensor]()
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        while len(chosen) < self._task.max_tokens and not bool(ended.all()):
            out = self._network(
                input_ids=ids, attention_mask=real, position_ids=positions, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            logprobs = out.logits[:, -1].float().log_softmax(1)
            ids = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            chosen.append(ids[:, 0])
            chances.append(logprobs.gather(1, ids)[:, 0])
            ended |= ids[:, 0] == self._words.eos_token_id
            cache, positions = out.past_key_values, positions[:, -1:] + 1
            real = torch.cat([real, torch.ones_like(ids)], dim=1)
        return [
            self._cut(prompt, row, chance)
            for prompt, row, chance in zip(
                prompts, torch.stack(chosen, 1).tolist(), torch.stack(chances, 1).tolist(), strict=True
            )
        ]

    def _cut(self, prompt: list[int], ids: list[int], chances: list[float]) -> SampledReply:
        """The reply up to its end."""
        end = self._words.eos_token_id
        length = ids.index(end) + 1 if end in ids else len(ids)
        return SampledReply(prompt, ids[:length], chances[:length])
