"""Rows of a file that are learnt beside those of each step, as `algorithm.mix` says.

Which rows a step has follows from its number and `trainer.seed` alone: each row once before any comes again, in another
order each time. A step that is made again after a crash has the same.
"""

import json
from functools import lru_cache
from typing import Self

import numpy as np
from jinja2 import TemplateError

from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.experience import Sample
from tuneloop.shared.finetuning.lines import FileLine, read_lines
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.edited_answers import edited_answer_ids
from tuneloop.trainer.batches.tokenizer import tokenizer_of


class MixedFile:
    """The rows of the file, and how many a step has."""

    def __init__(self, rows: list[Sample], *, count: int, share: float, seed: int) -> None:
        """`share` is the weight of their loss, 1 - `share` that of the others."""
        self._rows, self._count, self.share, self._seed = rows, count, share, seed
        self._order = lru_cache(2)(self._shuffle)

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """That of the settings, if there is one. Raises EnvironmentRefused, naming the line that cannot be learnt."""
        mix = settings.algorithm.mix
        if mix.file is None:
            return None
        rows: list[Sample] = []
        try:
            for line in read_lines(mix.file, "supervised"):
                rows += _rows_of(line, settings, first=len(rows))
        except OSError as error:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file} cannot be read: {error.strerror}") from None
        except (FileRefused, _LineRefused) as error:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file}: {error}") from None
        if not rows:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file} has nothing to be learnt")
        # So many that they are the share of all rows of the step.
        count = max(1, round(settings.buffer.train_batch_size * mix.share / (1 - mix.share)))
        return cls(rows, count=count, share=mix.share, seed=settings.trainer.seed)

    def rows(self, step: int) -> list[Sample]:
        """Those of the step after so many steps."""
        numbers = range(step * self._count, (step + 1) * self._count)
        places = (divmod(number, len(self._rows)) for number in numbers)
        return [self._rows[self._order(epoch)[place]] for epoch, place in places]

    def _shuffle(self, epoch: int) -> list[int]:
        found: list[int] = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()
        return found


class _LineRefused(Exception):
    """The message says which line, and why."""


def _rows_of(line: FileLine, settings: Settings, *, first: int) -> list[Sample]:
    """The messages of the assistant that are learnt, each behind what the template writes before it."""
    words, found = tokenizer_of(settings), list[Sample]()
    longest = settings.model.max_model_len or np.inf
    for at, message in enumerate(line.messages):
        if message.get("role") != "assistant" or message.get("weight") == 0:
            continue
        try:
            written = words.apply_chat_template(
                line.messages[:at], tools=list(line.tools or ()) or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise _LineRefused(f"line {line.number}: the chat template does not write it: {error}") from None
        sample = _row(words.encode(str(written), add_special_tokens=False), [], first + len(found))
        answer = {name: value for name, value in message.items() if name != "weight" and value is not None}
        ids = edited_answer_ids(sample, json.dumps(answer), settings)
        if isinstance(ids, str) or len(sample.prompt_ids) + len(ids) > longest:
            why = ids if isinstance(ids, str) else f"it has more than the {longest} tokens of model.max_model_len"
            raise _LineRefused(f"line {line.number}: {why.replace('the edited answer', 'the answer')}")
        found.append(_row(sample.prompt_ids.tolist(), ids, first + len(found)))
    return found


def _row(prompt: list[int], answer: list[int], number: int) -> Sample:
    return Sample(
        id=-1 - number,  # of no row of the ledger
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(answer, np.int32),
        logprobs=np.zeros(len(answer), np.float32),
        reward=1.0,
        temperature=1.0,
        version_min=0,
        version_max=0,
        tenant="",
        task_id=None,
        run_id=None,
        group_id=None,
        rewarded_at=0.0,
        committed_at=0.0,
    )
