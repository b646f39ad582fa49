"""Rows that are leased and on their way into a batch."""

from collections.abc import Sequence

import structlog

from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.selection import comparable
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()


class LeasedRows:
    """Those of one epoch. What cannot be trained on is dropped with its reason, and others take its place."""

    def __init__(self, settings: Settings, ledger: Ledger, recomputation: Recomputation, *, epoch: int) -> None:
        self._settings, self._training, self._epoch = settings, ledger.training, epoch
        self._recomputation = recomputation
        #: Leased, and in no batch yet.
        self.held: list[Sample] = []

    def next_batch(self, learner: Learner, *, version: int | None) -> list[Sample] | None:
        """A full batch of trainable rows, or what a batch timeout makes one. `version`: the learner is it."""
        size, timeout = self._settings.buffer.train_batch_size, self._settings.buffer.batch_timeout
        if len(self.held) < size:
            held = [sample.id for sample in self.held]
            leased = self._training.lease(self._epoch, size, BatchPolicy.of(self._settings), held=held)
            kept, refused = self._recomputation.select(leased, learner, version=version)
            self.held += kept
            for reason, samples in refused.items():
                self.drop(samples, reason, step=learner.steps)
        if len(self.held) < (size if timeout is None else 1):
            return None
        batch, self.held = self.held, []
        return batch

    def drop(self, samples: Sequence[Sample], reason: str, *, step: int) -> None:
        """Take them out of training for good, after so many steps."""
        self._training.drop(self._epoch, [sample.id for sample in samples], reason)
        _log.warning("experiences_dropped", count=len(samples), reason=reason, step=step)

    def take_back(self, samples: list[Sample], *, step: int) -> None:
        """Hold what is left of a batch of which some were dropped, but for groups in which nothing is compared now."""
        self.held, refused = comparable(samples, self._settings.algorithm, group_by=self._settings.buffer.group_by)
        for reason, others in refused.items():
            self.drop(others, reason, step=step)

    def release(self) -> None:
        """Give back all that the epoch holds."""
        self._training.release(self._epoch)
        self.held.clear()
