"""Registers a published checkpoint as a version: writes weights, renames the folder, inserts the row.

This may run during the next steps. The state for an exact resumption is written after the version (resumption.py).
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
from safetensors import SafetensorError

from tuneloop.shared.checkpoints import CheckpointStore, DiskSpace, File, Manifest, Probe, measure_space
from tuneloop.shared.errors import DiskFull, EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.job_marks import note_registered
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import DISK_FULL
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import MemoryCopies
from tuneloop.trainer.checkpoints.resumption import (
    PublishedVersion,
    StateToWrite,
    StateWriter,
    is_full,
    prune_by_settings,
)
from tuneloop.trainer.checkpoints.snapshot import CapturedWeights
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()


class PublicationResult(NamedTuple):
    """The end of a publication of `experiences` and `steps`. `version` None: the disk was full."""

    version: int | None
    step: int
    experiences: int
    steps: int
    began_ns: int
    measured: Metrics


class _Running(NamedTuple):
    """A publication under way. `state` None: it is captured at the end."""

    publication: "Publication"
    work: Future[PublishedVersion]
    state: StateToWrite | None
    begun: PublicationResult


class Publisher:
    """Publishes one version at a time under one epoch. `behind`: while training continues."""

    def __init__(
        self, settings: Settings, ledger: Ledger, store: CheckpointStore, *, epoch: int, behind: bool = False
    ) -> None:
        self._settings, self._ledger, self._store, self._epoch = settings, ledger, store, epoch
        self._alarm_may_be_open = True  # an earlier trainer may have raised it
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publication") if behind else None
        self._copies = MemoryCopies(snapshot.size_of_weights, snapshot.copy_weights)
        self._running: _Running | None = None
        self.states = StateWriter(settings, ledger, store, epoch=epoch)

    def prepare(self, learner: Learner) -> None:
        """Reserve memory for copies of a GPU's tensors, so that the first version does not wait."""
        self.states.prepare(learner)
        if self._pool is not None:
            self._copies.prepare(learner, self._pool)

    @property
    def steps_begun(self) -> int:
        """The number of steps in the version under way, or 0."""
        return self._running.begun.steps if self._running else 0

    @property
    def is_over(self) -> bool:
        """Whether the publication under way is done or failed."""
        return self._running is not None and self._running.work.done()

    def wait(self, seconds: float | None = None) -> None:
        if self._running is not None:
            wait_for([self._running.work], seconds)

    def begin(
        self,
        learner: Learner,
        ids: Collection[int],
        *,
        steps: int,
        parent: int,
        policy: int = 0,
        in_foreground: bool = False,
    ) -> None:
        """Start to publish the version after `parent`, of the rows `ids` and so many steps; `end` finishes it."""
        assert self._running is None
        started, began_ns = time.perf_counter(), time.time_ns()
        # First: a stale trainer stops here, and an unavailable database is noticed.
        self._ledger.training.extend(self._epoch)
        measured: Metrics = {}
        weights = None
        if self._pool is not None and not in_foreground:
            with _time_stage(measured, "staged"):
                weights = self._copies.of(learner)
            if weights is None:
                reason = "main memory has no room for a copy of the weights"
                _log.warning("published_in_the_foreground", reason=reason)
        state = self.states.capture(learner, patience_s=0) if weights else None
        behind = weights is not None and not (state and state.is_live)
        with _time_stage(measured, "probe"):
            probe = snapshot.probe(learner, self._settings)
        publication = Publication(
            self._settings,
            self._store,
            weights or snapshot.weights_of(learner),
            probe,
            epoch=self._epoch,
            parent=parent,
            policy=policy,
        )
        space = publication.space
        if space._replace(needed=space.needed + self.states.unwritten).missing:
            self.states.join()
            prune_by_settings(self._settings, self._store, self._ledger)
        if behind and self._pool is not None:
            work = self._pool.submit(self._register, publication, list(ids), started)
        else:
            work = Future()
            try:
                work.set_result(self._register(publication, ids, started))
            except Exception as error:  # noqa: BLE001 - `end` raises it
                work.set_exception(error)
        measured["time/save_checkpoint"] = time.perf_counter() - started
        begun = PublicationResult(None, learner.steps, len(ids), steps, began_ns, measured)
        self._running = _Running(publication, work, state, begun)

    def end(self, learner: Learner) -> PublicationResult:
        """The result of the finished publication. Raises EnvironmentRefused, and ledger errors."""
        assert self._running is not None
        (publication, work, state, begun), self._running = self._running, None
        started = time.perf_counter()
        try:
            published = work.result()
        except LedgerUnavailable:
            if publication.placed is not None:  # it may be registered, with the answer lost
                self.states.follow(publication.placed, state or self.states.capture(learner))
            raise
        except DiskFull as error:
            if self._ledger.alarms.raise_alarm(Alarm(name=DISK_FULL, reason=str(error), step=begun.step)):
                _log.error("waiting_for_room", reason=str(error))
            self._alarm_may_be_open = True
            return begun
        version = published.version
        state = state or self.states.capture(learner)
        self.states.follow(published, state)
        measured = begun.measured | publication.measured | state.measured
        measured["time/save_checkpoint"] += time.perf_counter() - started
        if self._alarm_may_be_open and not self.states.full and self._ledger.alarms.clear(DISK_FULL):
            _log.info("disk_space_restored", version=version)
        self._alarm_may_be_open = self.states.full
        return begun._replace(version=version, measured=measured)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.states.close()

    def _register(self, publication: "Publication", ids: Collection[int], started: float) -> PublishedVersion:
        """Runs in the thread, if any: explorers see a version once it is registered."""
        self._copies.wait()
        with self.states.priority.urgent():
            published = publication.register(self._ledger.training, ids)
        took = publication.measured["time/publish/registered"] = time.perf_counter() - started
        version = published.version
        try:
            note_registered(self._settings.job_dir, version, self._epoch)
        except OSError as error:  # the next version is noted too
            _log.warning("version_not_noted", version=version, reason=str(error))
        _log.info("version_published", version=published.version, step=published.step, seconds=round(took, 3))
        for sentence in self._ledger.reports.imbalance():
            _log.error("ledger_out_of_balance", reason=sentence, version=published.version)
        return published


class Publication:
    """A learner's captured weights, to become the version after `parent` of a policy."""

    def __init__(
        self,
        settings: Settings,
        store: CheckpointStore,
        weights: CapturedWeights,
        probe: Callable[[], Probe],
        *,
        epoch: int,
        parent: int,
        policy: int = 0,
    ) -> None:
        self._settings, self._store, self._weights, self._read_probe = settings, store, weights, probe
        self._epoch, self._parent, self._policy = epoch, parent, policy
        self.measured: Metrics = {}  # seconds by stage
        self.placed: PublishedVersion | None = None  # the version in its final folder, registered or not

    def register(self, training: Training, ids: Collection[int]) -> PublishedVersion:
        """Publish and register the next version, of the rows `ids`. Raises DiskFull, EnvironmentRefused."""
        staging: Path | None = None
        try:
            if (space := self.space).missing:
                raise DiskFull(space.sentence)
            staging = self._store.stage(self._epoch)
            with _time_stage(self.measured, "weights"):
                digests = snapshot.save_weights(self._weights, staging, base=self._settings.model.model_path)
            with _time_stage(self.measured, "sync"):
                files = self._store.seal(staging, digests=digests)
            put = partial(self.put, staging, files)
            with _time_stage(self.measured, "register"):
                step, parent, policy = self._weights.step, self._parent, self._policy
                training.register(self._epoch, ids, step=step, publish=put, parent=parent, policy=policy)
            assert self.placed is not None
            return self.placed
        except (OSError, SafetensorError) as error:
            training.extend(self._epoch)  # raises StaleEpoch if a newer trainer moved the files
            if is_full(error):
                raise DiskFull(f"{error}; {self.space.sentence}") from error
            raise EnvironmentRefused(
                f"checkpoint_root_dir: cannot write a checkpoint to {self._settings.job_dir}: {error}; "
                "free space or grant write access, and restart the trainer: nothing is lost"
            ) from error
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)

    def put(self, staging: Path, files: tuple[File, ...], version: int) -> tuple[Path, str]:
        """Move the sealed files to their final place under the version's number."""
        path, sha256 = self._store.publish(staging, self._manifest(version, files))
        self.placed = PublishedVersion(version, path, sha256, self._weights.step, self._policy)
        return path, sha256

    @property
    def space(self) -> DiskSpace:
        return measure_space(self._settings.job_dir, needed=self._weights.size)

    def _manifest(self, version: int, files: tuple[File, ...]) -> Manifest:
        return Manifest(
            version=version,
            parent=self._parent,
            step=self._weights.step,
            epoch=self._epoch,
            base_model=str(self._settings.model.model_path),
            created_at=time.time(),
            dtype=self._settings.trainer_dtype,
            probe=self._read_probe(),
            files=files,
            kind="lora" if self._settings.model.lora.rank else "full",
        )


@contextmanager
def _time_stage(measured: Metrics, stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    measured[f"time/publish/{stage}"] = time.perf_counter() - started
