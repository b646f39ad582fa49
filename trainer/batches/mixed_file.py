"""Rows of a file that are learnt beside those of each step, as `algorithm.mix` says.

Which rows a step has follows from its number and `trainer.seed` alone: each row once before any comes again, in another
order each time. A step that is made again after a crash has the same.
"""

from functools import lru_cache
from typing import Self

import numpy as np

from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.experience import Sample
from tuneloop.shared.finetuning.lines import read_lines
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.rendered_lines import LineLeftOut, LineTooLong, held_out, learnt_of, render


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
                for learnt in learnt_of(line):
                    written = render(learnt, line.tools, settings)
                    # Numbers below 0 are of no row of the ledger.
                    rows += [held_out(each, -1 - number) for number, each in enumerate(written, len(rows))]
        except OSError as error:
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file} cannot be read: {error.strerror}") from None
        except LineLeftOut as error:
            why = str(error)
            if isinstance(error, LineTooLong):
                why = f"it has more than the {error.longest:.0f} tokens of model.max_model_len"
            raise EnvironmentRefused(f"algorithm.mix.file: {mix.file}: line {line.number}: {why}") from None
        except FileRefused as error:
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
