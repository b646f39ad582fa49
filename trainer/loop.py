"""The trainer's loop: lease a batch, learn from it, publish what was learnt; for ever.

What the ledger says is the truth. Whenever this process is in doubt about it (it has just started, the database was
away, the newest version was rejected), it gives its leases back and goes on from the newest registered version: the
rows that came after are leased again, in the same order, and the same steps follow.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog
import torch
from transformers.utils.logging import disable_progress_bar

from shared import database
from shared.checkpoint import CheckpointStore, check_files, read_manifest
from shared.config import Settings
from shared.curves import Curves
from shared.errors import CheckpointRejected, EnvironmentRefused, LedgerUnavailable
from shared.experience import Sample
from shared.ledger import Ledger, Version
from trainer import metrics, snapshot
from trainer.batch import untrainable
from trainer.learner import Learner, NotFinite
from trainer.model import device_of, require_folders
from trainer.publication import Publication, prune
from trainer.stop import Stop

_log = structlog.get_logger()


def run(settings: Settings, stop: Stop) -> None:
    """Train until `stop` is set, or `trainer.total_steps` are done. Raises StaleEpoch if another takes over."""
    device_of(settings)
    require_folders(settings)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    buffer = settings.buffer.trainer_input.experience_buffer
    database.upgrade(settings.database_url, schema=buffer.name)
    ledger = Ledger(database.connect(settings.database_url, schema=buffer.name))
    try:
        ledger.own(settings.project, settings.name)
        ledger.ensure_base(settings.model.model_path.absolute())
        TrainingLoop(settings, ledger, stop).run()
    finally:
        ledger.close()


class TrainingLoop:
    """One trainer's life under one epoch.

    `_held` are leased rows on their way into a batch, `_unpublished` those in steps that no version contains yet.
    """

    def __init__(self, settings: Settings, ledger: Ledger, stop: Stop) -> None:
        self._settings, self._ledger, self._stop = settings, ledger, stop
        self._store = CheckpointStore(settings.job_dir)
        self._held: list[Sample] = []
        self._unpublished: list[int] = []
        self._unpublished_steps = 0
        self._away = False

    def run(self) -> None:
        """Take the next epoch and train under it."""
        self._epoch = self._ledger.take_epoch(f"{socket.gethostname()}:{os.getpid()}")
        with self._leases_given_back():
            self._resume(self._ledger.newest())
            while not self._stop.is_set() and not self._complete:
                try:
                    self._turn()
                except LedgerUnavailable as error:
                    self._wait_for_the_database(error)
            self._curves.close()
            _log.info("trainer_stopped", version=self._version, step=self._learner.steps)

    def _turn(self) -> None:
        if self._away:
            self._settle()
        self._ledger.extend(self._epoch)
        if self._ledger.newest().version != self._version:
            _log.warning("version_rejected", version=self._version)
            self._settle()
        batch = self._next_batch()
        if batch is None:
            self._stop.wait(self._settings.trainer.poll_interval)
        elif self._learn(batch) and self._due:
            self._publish()

    # In doubt.

    def _wait_for_the_database(self, error: LedgerUnavailable) -> None:
        if not self._away:
            _log.warning("database_away", reason=str(error))
        self._away = True
        self._stop.wait(self._settings.trainer.poll_interval)

    def _settle(self) -> None:
        """Do what a restart would: give everything back, and go on from the newest registered version."""
        self._ledger.release(self._epoch)
        self._held.clear()
        newest = self._ledger.newest()
        if self._unpublished_steps or newest.version != self._version:
            self._curves.close()
            del self._learner  # A GPU has no room for two.
            self._resume(newest)
        if self._away:
            self._away = False
            _log.info("database_back", version=self._version, step=self._learner.steps)

    def _resume(self, newest: Version) -> None:
        """Become the newest registered version."""
        if newest.version:
            _require_whole(newest)
        self._learner: Learner = snapshot.load(self._settings, newest.path if newest.version else None)
        snapshot.probe(self._learner, self._settings)  # What would refuse a publication does so before the work.
        self._version = newest.version
        self._unpublished.clear()
        self._unpublished_steps = 0
        self._curves = Curves(self._settings.tensorboard_dir / "trainer", after=self._learner.steps)
        self._waiting_since = time.perf_counter()
        _log.info("trainer_ready", version=self._version, step=self._learner.steps, epoch=self._epoch)

    @contextmanager
    def _leases_given_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            with suppress(LedgerUnavailable):  # The next trainer's epoch ends them too.
                self._ledger.release(self._epoch)

    # One step.

    def _next_batch(self) -> list[Sample] | None:
        """A full batch of trainable rows, if there are so many; rows that are not are dropped on the way."""
        size = self._settings.buffer.train_batch_size
        missing = size - len(self._held)
        staleness = self._settings.trainer.max_staleness
        for sample in self._ledger.lease(self._epoch, missing, max_staleness=staleness):
            reason = untrainable(sample, vocabulary=self._learner.actor.vocabulary)
            if reason is None:
                self._held.append(sample)
            else:
                self._drop([sample], reason)
        if len(self._held) < size:
            return None
        batch, self._held = self._held, []
        return batch

    def _drop(self, samples: list[Sample], reason: str) -> None:
        self._ledger.drop(self._epoch, [sample.id for sample in samples], reason)
        _log.warning("experiences_dropped", count=len(samples), reason=reason, step=self._learner.steps)

    def _learn(self, batch: list[Sample]) -> bool:
        """Whether a step was made of the batch; if not, its rows are dropped."""
        waited = time.perf_counter() - self._waiting_since
        try:
            learnt = self._learner.step(batch)
        except NotFinite as error:
            self._drop(batch, f"the step was not finite: {error}")
            return False
        except torch.OutOfMemoryError:
            budget = self._settings.trainer.micro_batch_tokens
            raise EnvironmentRefused(
                f"trainer.micro_batch_tokens: {budget} at once do not fit into the GPU's memory; lower it, or choose a "
                "smaller model"
            ) from None
        finally:
            self._waiting_since = time.perf_counter()
        self._unpublished += [sample.id for sample in batch]
        self._unpublished_steps += 1
        learnt |= metrics.of_samples(batch, version=self._version) | {"time/batch_wait": waited}
        self._curves.add(self._learner.steps, learnt)
        reward, seconds = learnt["critic/rewards/mean"], round(learnt["time/train_step"], 3)
        _log.info("step", step=self._learner.steps, version=self._version, reward=reward, seconds=seconds)
        return True

    @property
    def _complete(self) -> bool:
        total = self._settings.trainer.total_steps
        return total is not None and self._learner.steps >= total

    @property
    def _due(self) -> bool:
        return self._complete or self._unpublished_steps >= self._settings.trainer.save_interval

    # A version.

    def _publish(self) -> None:
        started = time.perf_counter()
        publication = Publication(self._settings, self._store, self._learner, epoch=self._epoch, parent=self._version)
        self._version = publication.register(self._ledger, self._unpublished)
        self._unpublished.clear()
        self._unpublished_steps = 0
        prune(self._store, self._ledger, keep=self._settings.trainer.max_checkpoints_to_keep)
        took = time.perf_counter() - started
        self._curves.add(self._learner.steps, {"time/save_checkpoint": took})
        _log.info("version_published", version=self._version, step=self._learner.steps, seconds=round(took, 3))
        for sentence in self._ledger.imbalance():
            _log.error("ledger_out_of_balance", reason=sentence, version=self._version)
        self._waiting_since = time.perf_counter()


def _require_whole(version: Version) -> None:
    try:
        check_files(version.path, read_manifest(version.path, sha256=version.manifest_sha256))
    except CheckpointRejected as error:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: the newest version is damaged, {version.path.parent}/{error}; restore that folder, "
            f"or mark version {version.version} as rejected in the database's table versions (and the one before it as "
            "champion, if this one was), and start again"
        ) from error
