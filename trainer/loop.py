"""Runs the trainer's loop: leases a batch, trains on it, publishes the result.

The ledger is authoritative. After a start, an outage of the database or a rejected version, the process returns its
leases and resumes from the newest registered version: later rows are leased again in the same order, and the same steps
follow.
"""

import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property

import msgspec
import structlog
from transformers.utils.logging import disable_progress_bar

from tuneloop.shared.capacity.memory import shares_gpu
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import (
    DatabaseAway,
    EnvironmentRefused,
    LeaseLost,
    LedgerUnavailable,
    ParentEnded,
)
from tuneloop.shared.evaluation.tasks import tasks_of
from tuneloop.shared.experience import PolicyState, Sample
from tuneloop.shared.job_marks import committed_stamp, note_registered, note_step_rules, require_restored
from tuneloop.shared.ledger.facts import find_ignored_feedback
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.training.training import WaitingRows
from tuneloop.shared.operations.job_folder import claim_folder, require_one_host
from tuneloop.shared.operations.older_ledger import find_lost_versions
from tuneloop.shared.operations.policy_report import make_configured
from tuneloop.shared.settings.base_model import require_folders, routing_note
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.opening import open_tracing
from tuneloop.shared.telemetry.trackers import check_tracker
from tuneloop.trainer.batches.selection import find_missing_library
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.evaluation.evaluation import is_evaluated_here
from tuneloop.trainer.file_jobs import FileJobs
from tuneloop.trainer.heartbeat import BEAT_S, Heartbeat
from tuneloop.trainer.micro_batch import fit_to_memory
from tuneloop.trainer.models.model import device_of
from tuneloop.trainer.monitoring.monitors import StepSpans
from tuneloop.trainer.parallel import ALONE, Ranks
from tuneloop.trainer.policies import RUN, PoliciesInMemory, PolicyTraining, PolicyTurns, SharedParts
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

_AGAIN_S = 3.0
_NOTICE_S = 0.1  # seconds between two checks for commits


def run(settings: Settings, stop: Stop, ranks: Ranks = ALONE) -> None:
    """Train as rank 0 until `stop` is set or `trainer.total_steps` are done. Raises StaleEpoch if overtaken."""
    device_of(settings)
    require_folders(settings)
    settings = fit_to_memory(settings)
    tasks_of(settings.monitor.evaluation)  # refuses an invalid file before waiting for the database
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
        if _open_ledger(settings, ledger, stop):
            tracing = open_tracing(settings, "trainer")
            if tracing is None:
                return TrainingLoop(settings, ledger, stop, ranks=ranks).run()
            with closing(tracing):
                TrainingLoop(settings, ledger, stop, spans=StepSpans(settings, tracing), ranks=ranks).run()
    finally:
        ledger.close()


def _open_ledger(settings: Settings, ledger: Ledger, stop: Stop) -> bool:
    """Upgrade the database, waiting for it except at a first start; False if stopped meanwhile."""
    require_restored(settings.job_dir)
    trained_before = (settings.tensorboard_dir / RUN).exists()
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
    """One trainer under one epoch. Only the current policy `_now` has rows or unpublished steps."""

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
        self._order = PolicyTurns()
        self._away, self._committed = False, 0

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
        behind = is_async and not is_evaluated_here(settings)
        self._publisher = Publisher(settings, ledger, self._store, epoch=epoch, behind=behind)
        parts = SharedParts(
            settings=settings,
            ledger=ledger,
            store=self._store,
            publisher=self._publisher,
            spans=self._spans,
            ranks=self._ranks,
            stop=self._stop,
            epoch=epoch,
        )
        with _end_epoch_at_exit(ledger, epoch), heartbeat, closing(self._publisher):
            self._policies = PoliciesInMemory(parts)
            while not self._stop.is_set():
                try:
                    if self._is_complete():
                        break
                    self._iterate()
                except LedgerUnavailable as error:
                    self._wait_for_the_database(error)
            if not heartbeat.overtaken:
                self._publish_at_stop()
            for each in self._policies.all():
                exact = not (heartbeat.overtaken or each.steps.count or each.learner.spoilt)
                self._publisher.states.finish(each.learner if exact else None, each.steps.parent, each.curves)
                each.curves.close()
            if heartbeat.overtaken:
                raise heartbeat.overtaken
            _log.info("trainer_stopped", version=self._now.steps.parent, step=self._now.learner.steps)

    @property
    def _now(self) -> PolicyTraining:
        return self._policies.now

    @cached_property
    def _file_jobs(self) -> FileJobs:
        return FileJobs(self._settings, self._ledger, self._policies.settings_of, self._epoch)

    def _is_complete(self) -> bool:
        """Whether all active policies have made their steps, and all steps are in versions."""
        now = self._now
        if now.steps.count or (now.policy.state is PolicyState.ACTIVE and not now.steps.are_all_made(now.learner)):
            return False
        active = [each.policy for each in self._ledger.training.waiting(0) if each.policy.state is PolicyState.ACTIVE]
        return bool(active) and not any(map(self._policies.has_steps_left, active))

    def _iterate(self) -> None:
        self._committed = committed_stamp(self._settings.job_dir)
        if self._away or self._now.learner.spoilt:
            self._settle()
        self._ledger.training.extend(self._epoch)
        ready = self._find_ready()
        self._end_publication()
        now, begun = self._now, self._publisher.steps_begun
        newest = now.ledger.versions.newest().version
        if newest != now.steps.parent and not (newest > now.steps.parent and begun):
            now.rejections.note(now.steps.parent)
            self._settle()
            now = self._now
        if now.finite.too_few:
            now.finite.alarm(step=now.learner.steps, version=now.steps.parent)
            if now.rows.held or now.steps.count:
                self._settle()
        others = [each for each in ready if each.policy.id != now.policy.id]
        if now.is_stopped:
            return None if self._switch_policy(others) else self._pause()
        if now.steps.are_due(now.learner):  # an earlier publication was running, or the disk was full
            return self._publish()
        if others and begun == now.steps.count > 0:
            return self._publisher.wait(self._settings.trainer.poll_interval)
        if others and not (now.steps.count or now.rows.ahead) and self._switch_policy(ready):
            return None
        enough = not self._policies.may_learn(now.policy) or now.steps.wait_for_room
        batch = None if enough else now.rows.next_batch(now.learner, version=now.steps.exact_version)
        if batch is not None:
            self._learn(batch)
        elif now.steps.count and not begun and (others or now.job or now.policy.state is not PolicyState.ACTIVE):
            self._publish()  # early: another policy waits, or an epoch is over
        else:
            self._idle()

    def _learn(self, batch: list[Sample]) -> None:
        now = self._now
        if now.job is not None:
            self._file_jobs.note_start(now)
        if not now.learn(batch):
            return
        if now.job is not None:
            self._file_jobs.note_step(now)
        if now.steps.are_due(now.learner):
            self._publish()

    def _find_ready(self) -> list[WaitingRows]:
        """Policies with a waiting batch; none if there is one policy. Releases deleted ones."""
        found = self._ledger.training.waiting(self._policies.largest_batch)
        if any(each.job for each in found) and self._file_jobs.feed(found, self._now):
            found = self._ledger.training.waiting(self._policies.largest_batch)
        there = {each.policy.id: each.policy for each in found}
        for gone in [each for each in self._policies.all() if each.policy.id not in there]:
            self._policies.forget(gone)
        now, policy = self._now, there[self._now.policy.id]
        if policy.settings != now.policy.settings and not now.steps.count:
            now.rows.release()
            self._policies.enter(policy)
        now.policy = msgspec.structs.replace(now.policy, state=policy.state)
        if len(found) == 1:
            return []
        ready = []
        for each in found:
            chosen = self._policies.settings_of(each.policy)
            is_full = chosen and each.fill(chosen.buffer.train_batch_size, chosen.buffer.batch_timeout)
            if is_full and self._policies.may_learn(each.policy):
                ready.append(each)
        return ready

    def _switch_policy(self, ready: Collection[WaitingRows]) -> bool:
        """Switch to the next policy with a batch, if it is another one."""
        by_number = {each.policy.id: each.policy for each in ready}
        for number in self._order.order(ready):
            if number == self._now.policy.id:
                return False
            if self._now.rows.held:
                self._now.rows.release()
            policy = by_number[number]
            chosen = self._policies.settings_of(policy)
            assert chosen is not None
            rules, size = BatchRules.of(chosen, number), chosen.buffer.train_batch_size
            if leased := self._ledger.training.lease(self._epoch, size, rules):
                self._publisher.states.catch_up(self._now.learner, self._now.steps.parent)
                began = time.monotonic()
                self._now.release_gpu()
                if self._policies.enter(policy):
                    self._now.rows.ahead = leased
                    _log.info("policy_switch", policy=policy.name, seconds=round(time.monotonic() - began, 3))
                else:
                    self._now.rows.release()
                return True
        return False

    def _idle(self) -> None:
        now = self._now
        if not self._publisher.steps_begun:
            if not now.steps.count:
                now.gate.evaluate(now.learner, now.steps.parent)
            # A starting engine counts others' use of its GPU as its own. Rows come from a running one.
            if now.is_cold and (self._committed != now.committed_before or not shares_gpu(self._settings)):
                now.is_cold = False
                return now.micro_batch.warm_up(now.learner)
            return self._pause()
        self._publisher.wait(self._settings.trainer.poll_interval)

    def _pause(self) -> None:
        """Sleep for the poll interval, or until rows are committed."""
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
        """Return everything as a restart would, and resume from the policy's newest registered version."""
        now = self._now
        now.steps.wait_for_publication(now.learner, now.curves)
        now.rows.release()
        newest = now.ledger.versions.newest()
        if now.steps.count or newest.version != now.steps.parent or now.learner.spoilt:
            self._policies.renew(newest)
        if self._away:
            self._away = False
            _log.info("database_back", version=self._now.steps.parent, step=self._now.learner.steps)

    def _publish(self) -> None:
        """Publish all steps, or start to if that runs behind the next ones."""
        now = self._now
        now.steps.begin(now.learner, now.curves)
        self._end_publication()
        self._now.note_published()

    def _end_publication(self) -> None:
        now = self._now
        if not self._publisher.is_over:
            return
        try:
            published = now.steps.end(now.learner, now.curves)
        except ParentEnded:
            now.rejections.note(now.steps.parent)
            return self._settle()
        except LeaseLost as error:  # a person was erased: no version may use the rows
            _log.warning("leases_lost", reason=str(error))
            return self._settle()
        if not published:
            self._pause()
            return
        self._order.note(now.policy.id)
        if now.job is not None:
            self._file_jobs.note_version(now)
        if not now.steps.count:
            now.gate.evaluate(now.learner, now.steps.parent)

    def _publish_at_stop(self) -> None:
        """Finish the current publication at a stop, and publish the steps after it."""
        now = self._now
        try:
            self._publisher.wait()
            self._end_publication()
            if now.steps.are_due(now.learner) and not (self._away or now.learner.spoilt):
                self._publish()
                self._publisher.wait()
                self._end_publication()
        except LedgerUnavailable as error:
            self._wait_for_the_database(error)


@contextmanager
def _end_epoch_at_exit(ledger: Ledger, epoch: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(LedgerUnavailable):  # the next trainer's epoch ends it too
            ledger.training.end(epoch)
