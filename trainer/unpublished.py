"""The steps that no registered version contains yet, and their way into one."""

from collections.abc import Sequence
from contextlib import suppress

from tuneloop.shared.errors import LeaseLost, LedgerUnavailable, ParentEnded
from tuneloop.shared.experience import Sample
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.trackers import CurveWriter
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.learner import Learner
from tuneloop.trainer.monitoring.pace_log import PaceLog
from tuneloop.trainer.monitoring.step_spans import StepSpans


class UnpublishedSteps:
    """Made after the registered version `parent`. The first of them may be in the version that is being published."""

    def __init__(
        self, settings: Settings, ledger: Ledger, publisher: Publisher, spans: StepSpans, *, epoch: int
    ) -> None:
        self._settings, self._publisher, self._spans, self._epoch = settings, publisher, spans, epoch
        self._pace = PaceLog(settings, ledger)
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
        self._publisher.begin(learner, self._ids, steps=self.count, parent=self.parent)

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
