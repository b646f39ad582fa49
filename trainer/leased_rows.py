"""Rows that are leased and on their way into a batch, and the steps of such batches that no registered version has."""

from collections.abc import Sequence
from contextlib import suppress

import structlog

from tuneloop.shared.errors import LeaseLost, LedgerUnavailable, ParentEnded
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.trackers import CurveWriter
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.batches.selection import comparable
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.monitoring.monitors import PaceLog, StepSpans

_log = structlog.get_logger()


class UnpublishedSteps:
    """Made after the registered version `parent`. The first of them may be in the version that is being published."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        publisher: Publisher,
        spans: StepSpans,
        *,
        epoch: int,
        policy: int = 0,
        in_foreground: bool = False,
    ) -> None:
        self._settings, self._publisher, self._spans, self._epoch = settings, publisher, spans, epoch
        self._policy, self._in_foreground = policy, in_foreground
        self._pace = PaceLog(settings, ledger, policy)
        self._ids: list[int] = []
        self.parent = self.count = 0
        self._found_no_room = False

    @property
    def exact_version(self) -> int | None:
        """The version that the learner is; None if it has made a step since."""
        return None if self.count else self.parent

    def restart(self, parent: int) -> None:
        """The learner has become the version `parent`."""
        self.parent, self.count, self._found_no_room = parent, 0, False
        self._ids.clear()
        self._spans.forget()

    def add(self, batch: Sequence[Sample], learnt: Metrics) -> None:
        """A step was made of the batch."""
        self._ids += [sample.id for sample in batch]
        self.count += 1
        self._pace.add_step(learnt["time/train_step"])

    def are_all_made(self, learner: Learner) -> bool:
        """Whether no step is to follow."""
        total = self._settings.trainer.total_steps
        return total is not None and learner.steps >= total

    def are_complete(self, learner: Learner) -> bool:
        """Whether no step is to follow, and all are in a version."""
        return self.are_all_made(learner) and not self.count

    def are_due(self, learner: Learner) -> bool:
        """Whether they are to become a version now: none while another is being published."""
        return self._publisher.steps_begun == 0 and self._are_enough(self.count, learner)

    def wait_for_publisher(self, learner: Learner) -> bool:
        """Whether they are enough for a version, but another is being published."""
        begun = self._publisher.steps_begun
        return begun > 0 and self._are_enough(self.count - begun, learner)

    def _are_enough(self, steps: int, learner: Learner) -> bool:
        return steps > 0 and (steps >= self._settings.trainer.save_interval or self.are_all_made(learner))

    @property
    def wait_for_room(self) -> bool:
        """Whether the last try to publish them found no room on the disk, and the next is under way: none is made."""
        return self._found_no_room and self._publisher.steps_begun > 0

    def begin(self, learner: Learner, curves: CurveWriter) -> None:
        """Begin to publish all of them."""
        self._publisher.states.report(curves)
        self._publisher.begin(
            learner,
            self._ids,
            steps=self.count,
            parent=self.parent,
            policy=self._policy,
            in_foreground=self._in_foreground,
        )

    def end(self, learner: Learner, curves: CurveWriter) -> bool:
        """Whether a version was registered; there may have been no room for it. Raises what Publisher.end does."""
        ended = self._publisher.end(learner)
        self._found_no_room = ended.version is None
        if ended.version is None:
            return False
        self.parent = ended.version
        self.count -= ended.steps
        del self._ids[: ended.experiences]
        self._spans.send_version(ended.version, step=ended.step, steps=ended.steps, started=ended.began_ns)
        curves.add(ended.step, ended.measured)
        self._pace.end_version(self._epoch, ended.experiences, publish_s=ended.measured["time/save_checkpoint"])
        return True

    def wait_for_publication(self, learner: Learner, curves: CurveWriter) -> None:
        """Wait until none is being published, nor the state of one written. The ledger knows what came of it."""
        self._publisher.wait()
        if self._publisher.is_over:
            with suppress(LedgerUnavailable, LeaseLost, ParentEnded):
                self.end(learner, curves)
        self._publisher.states.join()


class LeasedRows:
    """Those of a policy in one epoch. What cannot be trained on is dropped with its reason, others take its place."""

    def __init__(
        self, settings: Settings, ledger: Ledger, recomputation: Recomputation, *, epoch: int, policy: int = 0
    ) -> None:
        self._settings, self._training, self._epoch = settings, ledger.training, epoch
        self._rules, self._recomputation = BatchRules.of(settings, policy), recomputation
        #: What was leased before the learner was there.
        self.ahead: list[Sample] = []
        #: Leased, and in no batch yet.
        self.held: list[Sample] = []

    def next_batch(self, learner: Learner, *, version: int | None) -> list[Sample] | None:
        """A full batch of trainable rows, or what a batch timeout makes one. `version`: the learner is it."""
        size, timeout = self._settings.buffer.train_batch_size, self._settings.buffer.batch_timeout
        if len(self.held) < size:
            held = [sample.id for sample in self.held]
            leased = self.ahead or self._training.lease(self._epoch, size, self._rules, held=held)
            self.ahead = []
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
        rules, algorithm = self._rules, self._settings.algorithm
        self.held, refused = comparable(samples, algorithm, group_by=rules.group_by, least_runs=rules.least_runs)
        for reason, others in refused.items():
            self.drop(others, reason, step=step)

    def release(self) -> None:
        """Give back all that the epoch holds."""
        self._training.release(self._epoch)
        self.held, self.ahead = [], []
