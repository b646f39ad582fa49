"""The teacher of `distill`: a local model, or one behind an endpoint (trainer/teacher/endpoint.py).

It has the tokenizer of the model that is trained: what it is asked about are token ids.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from tuneloop.shared.errors import EnvironmentRefused, SamplesRefused, TeacherAway
from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import collate, micro_batches
from tuneloop.trainer.batches.sequences import TokenSequence, with_completion
from tuneloop.trainer.batches.tokenizer import ends_of, tokenizer_of
from tuneloop.trainer.models.model import Actor

#: The most tokens of a teacher's reply where `model.max_response_tokens` does not say.
MOST_TOKENS = 2048

CUT_OFF = "the teacher's reply was cut off at {} tokens"
NO_NUMBER = "the teacher's log-probability of a token is not a number"
_NO_ROOM = "the GPU's memory has no room for the teacher's reply"


class Teacher(Protocol):
    """What is asked of a teacher. Both raise TeacherAway or SamplesRefused."""

    def check(self) -> None:
        """Raise EnvironmentRefused if it cannot be a teacher of this model, TeacherAway if it cannot be asked."""

    def score(self, sequences: Sequence[TokenSequence], *, tokens: int | None = None) -> Tensor:
        """Its log-probabilities at temperature 1 of the sequences' action tokens, float32 of shape BR, else 0.

        `tokens`: so many go through a model on this machine at once; None: as many as the settings say.
        """
        ...

    def reply(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with its replies, which it sampled at temperature 1, in the place of their own."""
        ...


class _Generates(Protocol):
    def generate(self, ids_BT: Tensor, **options: Any) -> Tensor: ...


class _Numbers(LogitsProcessor):
    """Raises FloatingPointError before a token would be sampled from NaN, which on a GPU ends the process."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise FloatingPointError(NO_NUMBER)
        return scores


class LocalTeacher:
    """A Hugging Face model in a folder of this machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._actor = Actor.load(settings, folder)
        self._actor.network.requires_grad_(requires_grad=False)
        self._words = tokenizer_of(settings, folder, "algorithm.distill.teacher_path")

    def check(self) -> None:
        """Raise EnvironmentRefused unless both models have the same words under the same numbers."""
        ours, theirs = tokenizer_of(self._settings).get_vocab(), self._words.get_vocab()
        if ours != theirs:
            different = next(word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word))
            raise EnvironmentRefused(
                f"algorithm.distill.teacher_path: its tokenizer is another than the model's: {different!r} is token "
                f"{theirs.get(different)} there and {ours.get(different)} here; choose a teacher with the same one"
            )

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence], *, tokens: int | None = None) -> Tensor:
        """See Teacher. Raises torch.OutOfMemoryError too."""
        self._must_know(call for sequence in sequences for call in sequence.calls)
        batch = collate(sequences)
        batch = replace(batch, temperatures_BR=torch.ones_like(batch.temperatures_BR))
        all_BR = torch.zeros_like(batch.sampled_BR)
        budget, padded = tokens or self._settings.trainer.tokens_at_once, not self._actor.is_packed
        for index_B in micro_batches(batch.lengths_B, budget, padded=padded):
            part_BR = self._actor.logprobs(batch.rows(index_B)).cpu()
            all_BR[index_B, : part_BR.shape[1]] = part_BR
        strange_B = all_BR.isnan().any(1)
        if strange_B.all():
            raise TeacherAway(NO_NUMBER)
        if strange_B.any():
            raise SamplesRefused(
                {NO_NUMBER: [call.id for at in strange_B.nonzero()[:, 0] for call in sequences[at].calls]}
            )
        return all_BR

    @torch.no_grad()
    def reply(self, samples: Sequence[Sample]) -> list[Sample]:
        """See Teacher. A sample gets the same reply however often it is asked."""
        self._must_know(samples)
        most = self._settings.model.max_response_tokens or MOST_TOKENS
        ends = ends_of(self._settings.model.model_path, self._words)
        replies = [self._reply_ids(sample, most, ends) for sample in samples]
        if all(each in (NO_NUMBER, _NO_ROOM) for each in replies):
            raise TeacherAway(str(replies[0]))
        return with_replies(samples, replies, known=len(self._words))

    def _reply_ids(self, sample: Sample, most: int, ends: list[int]) -> list[int] | str:
        """The ids of its reply, or why it has none."""
        try:
            ids_1T = torch.tensor(sample.prompt_ids.astype(np.int64), device=self._actor.network.device)[None]
            with torch.random.fork_rng():
                torch.manual_seed(self._settings.trainer.seed + sample.id)
                generated = cast(_Generates, self._actor.network).generate(
                    ids_1T,
                    attention_mask=torch.ones_like(ids_1T),
                    max_new_tokens=most,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    eos_token_id=ends,
                    pad_token_id=ends[0],
                    logits_processor=LogitsProcessorList([_Numbers()]),
                )
            ids = cast(list[int], generated[0, ids_1T.shape[1] :].tolist())
        except FloatingPointError as error:
            return str(error)
        except torch.OutOfMemoryError:
            return _NO_ROOM
        return ids if ids[-1] in ends else CUT_OFF.format(most)

    def _must_know(self, samples: Iterable[Sample]) -> None:
        known = self._actor.vocabulary
        strange = [s.id for s in samples if max(s.prompt_ids.max(), s.completion_ids.max(initial=0)) >= known]
        if strange:
            raise SamplesRefused({f"a token is outside the teacher's vocabulary of {known}": strange})


def with_replies(samples: Sequence[Sample], replies: Sequence[list[int] | str], *, known: int) -> list[Sample]:
    """The samples with other replies; raises SamplesRefused if one is a reason instead of ids of the `known` tokens."""
    refused: defaultdict[str, list[int]] = defaultdict(list)
    demonstrations = []
    for sample, reply in zip(samples, replies, strict=True):
        if isinstance(reply, str):
            refused[reply].append(sample.id)
        elif not all(0 <= token < known for token in reply):
            refused[f"the teacher's reply has a token beyond the tokenizer's {known}"].append(sample.id)
        else:
            demonstrations.append(with_completion(sample, reply))
    if refused:
        raise SamplesRefused(dict(refused))
    return demonstrations
