"""The trainer's loop: lease a batch, learn from it, publish what was learnt; for ever.

What the ledger says is the truth. Whenever this process is in doubt about it (it has just started, the database was
away, the newest version was rejected), it gives its leases back and goes on from the newest registered version: the
rows that came after are leased again, in the same order, and the same steps follow.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import structlog
from transformers.utils.logging import disable_progress_bar

from tuneloop.shared.capacity.memory import shares_gpu
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import (
    DatabaseAway,
    EnvironmentRefused,
    LeaseLost,
    LedgerUnavailable,
    NotFinite,
    ParentEnded,
    SamplesRefused,
    TeacherAway,
    TurnNotGiven,
)
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import Sample
from tuneloop.shared.job_marks import committed_stamp, note_registered, note_step_rules, require_restored
from tuneloop.shared.ledger.facts import find_ignored_feedback
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.operations.job_folder import claim_folder, require_one_host
from tuneloop.shared.operations.older_ledger import find_lost_versions
from tuneloop.shared.operations.policy_report import make_configured
from tuneloop.shared.settings.base_model import require_folders, routing_note
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.opening import open_tracing
from tuneloop.shared.telemetry.trackers import check_tracker, open_curves
from tuneloop.trainer.batches.batch import of_samples
from tuneloop.trainer.batches.selection import find_missing_library
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.checkpoints.recomputation import Recomputation
from tuneloop.trainer.checkpoints.resumption import find_state, require_weights
from tuneloop.trainer.evaluation.gate import GateEvaluation
from tuneloop.trainer.gpu_turns import GpuTurns
from tuneloop.trainer.heartbeat import BEAT_S, Heartbeat
from tuneloop.trainer.leased_rows import LeasedRows, UnpublishedSteps
from tuneloop.trainer.micro_batch import MicroBatch, fit_to_memory
from tuneloop.trainer.models.model import device_of
from tuneloop.trainer.models.room import room_for_weights
from tuneloop.trainer.monitoring.monitors import FiniteSteps, Monitors, Rejections, StepSpans
from tuneloop.trainer.parallel import ALONE, Ranks
from tuneloop.trainer.stop import Stop
from tuneloop.trainer.teacher.teacher import TeacherRetries

_log = structlog.get_logger()

_RUN = "trainer"
_AGAIN_S = 3.0
#: How often it is looked whether rows were committed.
_NOTICE_S = 0.1


def run(settings: Settings, stop: Stop, ranks: Ranks = ALONE) -> None:
    """Train until `stop` is set, or `trainer.total_steps` are done. Raises StaleEpoch if another takes over.

    Of several ranks it is run by rank 0; the others follow (trainer/workers/rank.py).
    """
    device_of(settings)
    require_folders(settings)
    settings = fit_to_memory(settings)
    tasks_of(settings.monitor.evaluation)  # A file that is refused is so before the database is waited for.
    if nothing := find_ignored_feedback(settings):
        _log.warning("feedback_not_counted", sentence=nothing)
    if missing := find_missing_library(settings):
        _log.warning("grammars_not_rebuilt", sentence=missing)
    if unbounded := settings.algorithm.unbounded:
        _log.warning("ratio_unbounded", sentence=unbounded)
    if mismatch := routing_note(settings):
        _log.warning("routing_may_differ", sentence=mismatch)
    check_tracker(settings)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    ledger = Ledger.of(settings)
    try:
        if _opened(settings, ledger, stop):
            tracing = open_tracing(settings, "trainer")
            if tracing is None:
                return TrainingLoop(settings, ledger, stop, ranks=ranks).run()
            with closing(tracing):
                TrainingLoop(settings, ledger, stop, spans=StepSpans(settings, tracing), ranks=ranks).run()
    except TurnNotGiven as error:  # Rows of steps that no version has are trained on again.
        _log.info("trainer_stopped", reason=str(error))
    finally:
        ledger.close()


def _opened(settings: Settings, ledger: Ledger, stop: Stop) -> bool:
    """Bring the database up to date; False if told to stop first.

    Where this experiment was trained before, a database that is away is waited for; a first start is refused without.
    """
    require_restored(settings.job_dir)
    trained_before = (settings.tensorboard_dir / _RUN).exists()
    while not stop.is_set():
        try:
            database.upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
            ledger.own(settings.project, settings.name)
            claim_folder(settings.job_dir, ledger)
            require_one_host(settings, ledger)
            ledger.versions.ensure_base(settings.model.model_path.absolute())
            make_configured(settings, ledger)
            if (older := find_lost_versions(settings.job_dir, ledger)) is not None:
                raise EnvironmentRefused(older)
            return True
        except (DatabaseAway, LedgerUnavailable) as error:
            if not trained_before:
                raise
            _log.warning("waiting_for_the_database", reason=str(error))
            stop.wait(_AGAIN_S)
    return False


class TrainingLoop:
    """One trainer's life under one epoch.

    `_rows` are those on their way into a batch, `_steps` those that no registered version contains yet.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        stop: Stop,
        *,
        beat_s: float = BEAT_S,
        spans: StepSpans | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._settings, self._ledger, self._stop, self._ranks = settings, ledger, stop, ranks
        self._beat_s, self._spans = beat_s, spans or StepSpans(settings, None)
        self._store = CheckpointStore(settings.job_dir, mode=int(settings.trainer.checkpoint_mode, 8))
        self._turns, self._monitors = GpuTurns(settings, stop), Monitors(settings, ledger)
        self._micro_batch = MicroBatch(settings, stop, take_gpu=self._turns.begin)
        self._gate = GateEvaluation(settings, ledger, take_gpu=self._turns.begin)
        self._finite, self._rejections = FiniteSteps(settings, ledger.alarms), Rejections(ledger)
        self._recomputation = Recomputation(settings, ledger, self._micro_batch)
        self._away, self._committed = False, 0
        self._is_cold, self._committed_before = False, 0

    def run(self) -> None:
        """Take the next epoch and train under it."""
        settings, ledger = self._settings, self._ledger
        self._epoch = epoch = ledger.training.take_epoch(f"{socket.gethostname()}:{os.getpid()}")
        note_registered(settings.job_dir, 0, epoch)
        note_step_rules(settings.job_dir, settings.step_rules)
        heartbeat = Heartbeat(ledger, epoch, self._stop, interval_s=self._beat_s)
        self._store.clear(epoch)
        chosen = settings.trainer.async_save
        is_async = device_of(settings).type == "cuda" if chosen is None else chosen
        behind = is_async and not self._gate.wanted
        self._publisher = Publisher(settings, ledger, self._store, epoch=epoch, behind=behind)
        self._rows = LeasedRows(settings, ledger, self._recomputation, epoch=epoch)
        self._steps = UnpublishedSteps(settings, ledger, self._publisher, self._spans, epoch=epoch)
        with _end_epoch_at_exit(ledger, epoch), heartbeat, closing(self._publisher), closing(self._turns):
            self._teacher = TeacherRetries(settings, ledger.alarms, self._stop)
            newest = ledger.versions.newest()
            self._resume(newest, _state_of(newest, ledger, self._store))
            while not self._stop.is_set() and not self._steps.are_complete(self._learner):
                try:
                    self._turn()
                except TurnNotGiven:
                    break
                except LedgerUnavailable as error:
                    self._wait_for_the_database(error)
            if not heartbeat.overtaken:
                self._publish_the_last()
            exact = not (heartbeat.overtaken or self._steps.count or self._learner.spoilt)
            self._publisher.states.finish(self._learner if exact else None, self._steps.parent, self._curves)
            self._curves.close()
            self._turns.end(self._learner)
            if heartbeat.overtaken:
                raise heartbeat.overtaken
            _log.info("trainer_stopped", version=self._steps.parent, step=self._learner.steps)

    def _turn(self) -> None:
        self._committed = committed_stamp(self._settings.job_dir)
        self._turns.end_if_over(self._learner, publishes=self._steps.wait_for_publisher(self._learner))
        if self._away or self._learner.spoilt:
            self._settle()
        self._ledger.training.extend(self._epoch)
        self._end_publication()
        newest = self._ledger.versions.newest().version
        if newest != self._steps.parent and not (newest > self._steps.parent and self._publisher.steps_begun):
            self._rejections.note(self._steps.parent)
            self._settle()
        if self._rejections.are_too_many:
            return self._pause()
        if self._finite.too_few:
            self._finite.alarm(step=self._learner.steps, version=self._steps.parent)
            if self._rows.held or self._steps.count:
                self._settle()
            return self._pause()
        if self._steps.are_due(self._learner):  # Another was not done, or it did not fit.
            return self._publish()
        enough = self._steps.are_all_made(self._learner) or self._steps.wait_for_room
        batch = None if enough else self._rows.next_batch(self._learner, version=self._steps.exact_version)
        if batch is None:
            self._idle()
        elif self._learn(batch) and self._steps.are_due(self._learner):
            self._publish()

    def _idle(self) -> None:
        if not self._publisher.steps_begun:
            if not self._steps.count:
                self._gate.evaluate(self._learner, self._steps.parent)
            # An engine that starts reckons what others take of its GPU as its own. Rows come of one that runs.
            begun = self._committed != self._committed_before or not shares_gpu(self._settings)
            if self._is_cold and begun:
                self._is_cold = False
                return self._micro_batch.rehearse(self._learner)
            return self._pause()
        if not self._steps.wait_for_publisher(self._learner):
            self._turns.end(self._learner)
        self._publisher.wait(self._settings.trainer.poll_interval)

    def _pause(self) -> None:
        """Look again a little later, or when rows are committed; the GPU is not needed meanwhile."""
        self._turns.end(self._learner)
        ends = time.monotonic() + self._settings.trainer.poll_interval
        while (left := ends - time.monotonic()) > 0 and not self._stop.wait(min(_NOTICE_S, left)):
            if committed_stamp(self._settings.job_dir) != self._committed:
                return

    def _wait_for_the_database(self, error: LedgerUnavailable) -> None:
        if not self._away:
            _log.warning("database_away", reason=str(error))
        self._away = True
        self._pause()

    def _settle(self) -> None:
        """Do what a restart would: give everything back, and go on from the newest registered version."""
        self._steps.wait_for_publication(self._learner, self._curves)
        self._rows.release()
        newest = self._ledger.versions.newest()
        if self._steps.count or newest.version != self._steps.parent or self._learner.spoilt:
            state = _state_of(newest, self._ledger, self._store)
            self._turns.take()
            self._publisher.states.settle(self._curves)
            self._curves.close()
            del self._learner  # A GPU has no room for two.
            self._resume(newest, state)
        if self._away:
            self._away = False
            _log.info("database_back", version=self._steps.parent, step=self._learner.steps)

    def _resume(self, newest: Version, state: Path | None) -> None:
        """Become the newest registered version, with the `state` that was found for it."""
        self._turns.take()
        with room_for_weights():
            self._learner = snapshot.resume(self._settings, newest.path if newest.version else None, state, self._ranks)
            self._learner.teacher = self._teacher.teacher
            self._learner.micro_batch_tokens = self._micro_batch.tokens
            self._publisher.prepare(self._learner)
            snapshot.probe(self._learner, self._settings)  # What would refuse a publication does so before the work.
        self._steps.restart(newest.version)
        self._curves = open_curves(self._settings, _RUN, after=self._learner.steps)
        self._curves.add(self._learner.steps, self._monitors.begin(self._learner))
        self._waiting_since = time.perf_counter()
        # By turns the GPU is the engine's while rows are awaited.
        self._is_cold = self._learner.actor.is_compiled and self._settings.cluster.gpu_turn is None
        self._committed_before = committed_stamp(self._settings.job_dir)
        self._gate.evaluate(self._learner, self._steps.parent)
        _log.info("trainer_ready", version=self._steps.parent, step=self._learner.steps, epoch=self._epoch)

    def _learn(self, batch: list[Sample]) -> bool:
        """Whether a step was made of the batch; if not, its rows are dropped, or wait for the teacher."""
        waited, started = time.perf_counter() - self._waiting_since, time.time_ns()
        drop, self._is_cold = partial(self._rows.drop, step=self._learner.steps), False
        try:
            labelled = self._teacher.label(batch)
            learnt = self._micro_batch.step(self._learner, labelled, version=self._steps.exact_version)
        except (TeacherAway, SamplesRefused) as error:
            self._turns.end(self._learner)
            left = self._teacher.requeue(batch, error, drop=drop)
            self._rows.take_back(left, step=self._learner.steps)
            return False
        except NotFinite as error:
            drop(batch, f"the step was not finite: {error}")
            self._finite.note_failure(str(error), after=self._learner.steps)
            return False
        finally:
            self._waiting_since = time.perf_counter()
        self._steps.add(batch, learnt)
        self._teacher.succeeded()
        self._finite.note_success(self._learner.steps)
        buffer = self._settings.buffer
        size = buffer.group_size if buffer.group_by == "task" else 0
        learnt |= of_samples(batch, version=self._steps.parent, group_size=size) | {"time/batch_wait": waited}
        learnt |= self._recomputation.take_figures()
        learnt |= self._monitors.after_step(self._learner, learnt, version=self._steps.parent, replies=batch)
        self._waiting_since = time.perf_counter()
        self._curves.add(self._learner.steps, learnt)
        step, version = self._learner.steps, self._steps.parent
        if learnt.get("critic/advantages/zero") == 1:
            reason = "every advantage of the batch is 0, or its token masked"
            _log.warning("nothing_to_learn", step=step, reason=reason)
        seconds = round(learnt["time/train_step"], 3)
        _log.info("step", step=step, version=version, reward=learnt["critic/rewards/mean"], seconds=seconds)
        self._spans.send_step(self._learner.steps, batch, started=started)
        return True

    def _publish(self) -> None:
        """Publish all steps; where that is done behind the next ones, begin to."""
        self._turns.begin(self._learner)
        self._steps.begin(self._learner, self._curves)
        self._end_publication()
        self._waiting_since = time.perf_counter()

    def _end_publication(self) -> None:
        """If one has begun and is over."""
        if not self._publisher.is_over:
            return
        try:
            published = self._steps.end(self._learner, self._curves)
        except ParentEnded:
            self._rejections.note(self._steps.parent)
            return self._settle()
        except LeaseLost as error:  # The person of a row was erased: no version may be made of it.
            _log.warning("leases_lost", reason=str(error))
            return self._settle()
        if not published:
            self._pause()
        elif not self._steps.count:
            self._gate.evaluate(self._learner, self._steps.parent)

    def _publish_the_last(self) -> None:
        """Before a stop: end what has begun, and publish the steps that waited for it."""
        try:
            self._publisher.wait()
            self._end_publication()
            if self._steps.are_due(self._learner) and not (self._away or self._learner.spoilt):
                self._publish()
                self._publisher.wait()
                self._end_publication()
        except LedgerUnavailable as error:
            self._wait_for_the_database(error)
        except TurnNotGiven as error:
            _log.warning("steps_not_published", steps=self._steps.count, reason=str(error))


def _state_of(newest: Version, ledger: Ledger, store: CheckpointStore) -> Path | None:
    """What a version is resumed with, whose weights are what they should be."""
    if not newest.version:
        return None
    require_weights(newest, store)
    return find_state(newest, ledger.versions, store)


@contextmanager
def _end_epoch_at_exit(ledger: Ledger, epoch: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(LedgerUnavailable):  # The next trainer's epoch ends it too.
            ledger.training.end(epoch)
