"""How a version comes into the world: its weights on disk, then its name, then its row; or nothing.

What only going on from it to the bit needs follows behind (state_writer.py).
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from safetensors import SafetensorError

from tuneloop.shared.checkpoints.manifest import File, Manifest, Probe
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.disk_space import DiskSpace, measure_space
from tuneloop.shared.errors import DiskFull, EnvironmentRefused, LedgerUnavailable
from tuneloop.shared.job_marks import note_registered
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.operations.diagnosis import DISK_FULL
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.batches.metrics import Metrics
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.pruning import prune_by_settings
from tuneloop.trainer.checkpoints.state_writer import PublishedVersion, StateWriter, is_full
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()


class Publisher:
    """Publishes under one epoch. Where a checkpoint does not fit, that is an alarm, and another try later.

    `measured`: what the last version took, in seconds.
    """

    def __init__(self, settings: Settings, ledger: Ledger, store: CheckpointStore, *, epoch: int) -> None:
        self._settings, self._ledger, self._store, self._epoch = settings, ledger, store, epoch
        self._alarm_may_be_open = True  # an earlier trainer's
        self.states = StateWriter(settings, ledger, store, epoch=epoch)
        self.measured: Metrics = {}

    def publish(self, learner: Learner, ids: Collection[int], *, parent: int) -> int | None:
        """Publish and register the version after `parent`, made of the rows `ids`; None: there is no room for it.

        Critic and optimiser follow in the background. Raises EnvironmentRefused if the disk refuses for another reason.
        """
        training, started = self._ledger.training, time.perf_counter()
        # Before the long work: a stale trainer stops here, a database that is away is noticed.
        training.extend(self._epoch)
        publication = Publication(self._settings, self._store, learner, epoch=self._epoch, parent=parent)
        if publication.space.missing:
            self._make_room()
        try:
            published = publication.register(training, ids)
        except LedgerUnavailable:
            if publication.placed is not None:  # It may be registered, and only the answer lost.
                self.states.follow(learner, publication.placed)
            raise
        except DiskFull as error:
            if self._ledger.alarms.raise_alarm(Alarm(name=DISK_FULL, reason=str(error), step=learner.steps)):
                _log.error("waiting_for_room", reason=str(error))
            self._alarm_may_be_open = True
            return None
        version, took = published.version, time.perf_counter() - started
        self._note(version)  # Before the copy: explorers need not wait for that.
        followed = self.states.follow(learner, published)
        self.measured = {**publication.measured, "time/publish/registered": took, **followed}
        self.measured["time/save_checkpoint"] = time.perf_counter() - started
        if self._alarm_may_be_open and not self.states.full and self._ledger.alarms.clear(DISK_FULL):
            _log.info("disk_space_restored", version=version)
        self._alarm_may_be_open = self.states.full
        _log.info("version_published", version=version, step=learner.steps, seconds=round(took, 3))
        for sentence in self._ledger.reports.imbalance():
            _log.error("ledger_out_of_balance", reason=sentence, version=version)
        return version

    def _make_room(self) -> None:
        """Delete now what is otherwise deleted behind the next version."""
        self.states.join()
        prune_by_settings(self._settings, self._store, self._ledger)

    def _note(self, version: int) -> None:
        try:
            note_registered(self._settings.job_dir, version, self._epoch)
        except OSError as error:  # The next one is noted, too.
            _log.warning("version_not_noted", version=version, reason=str(error))


class Publication:
    """The learner as it is now, about to become the version after `parent`."""

    def __init__(
        self, settings: Settings, store: CheckpointStore, learner: Learner, *, epoch: int, parent: int
    ) -> None:
        self._settings, self._store, self._learner = settings, store, learner
        self._epoch, self._parent = epoch, parent
        #: The seconds of each stage.
        self.measured: Metrics = {}
        #: What is in its place, whether it is registered or not.
        self.placed: PublishedVersion | None = None

    def register(self, training: Training, ids: Collection[int]) -> PublishedVersion:
        """Publish and register the next version, made of the rows `ids`.

        Raises DiskFull if it does not fit, EnvironmentRefused if the disk does not take it for another reason.
        """
        staging: Path | None = None
        try:
            self._require_room()
            staging = self._store.stage(self._epoch)
            with self._time_stage("weights"):
                digests = snapshot.save_weights(self._learner, staging, base=self._settings.model.model_path)
            put = self._seal(staging, training.next_version(), digests)
            with self._time_stage("register"):
                training.register(self._epoch, ids, step=self._learner.steps, publish=put)
            assert self.placed is not None
            return self.placed
        except (OSError, SafetensorError) as error:
            training.extend(self._epoch)  # A newer trainer has moved away what this one was writing.
            if is_full(error):
                raise DiskFull(f"{error}; {self.space.sentence}") from error
            raise EnvironmentRefused(
                f"checkpoint_root_dir: cannot write a checkpoint to {self._settings.job_dir}: {error}; "
                "make room or give us the right to write there, and start the trainer again: nothing is lost"
            ) from error
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)

    def _seal(self, staging: Path, expected: int, digests: Mapping[Path, str]) -> Callable[[int], tuple[Path, str]]:
        """Bring all of `staging` to disk; what then gives it its name, and is quick if that is `expected`."""
        with self._time_stage("probe"):
            probe = snapshot.probe(self._learner, self._settings)
        with self._time_stage("sync"):
            files = self._store.seal(staging, digests=digests)
            # Not within the transaction: a disk may be slower than the database is patient.
            sha256 = self._store.describe(staging, self._manifest(expected, probe, files))

        def put(version: int) -> tuple[Path, str]:
            same = version == expected
            measured = sha256 if same else self._store.describe(staging, self._manifest(version, probe, files))
            path = self._store.put(staging, version)
            self.placed = PublishedVersion(version, path, measured, self._learner.steps)
            return path, measured

        return put

    def _require_room(self) -> None:
        if (space := self.space).missing:
            raise DiskFull(space.sentence)

    @property
    def space(self) -> DiskSpace:
        """The room for what is registered."""
        return measure_space(self._settings.job_dir, needed=snapshot.size_of_weights(self._learner))

    @contextmanager
    def _time_stage(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.measured[f"time/publish/{stage}"] = time.perf_counter() - started

    def _manifest(self, version: int, probe: Probe, files: tuple[File, ...]) -> Manifest:
        return Manifest(
            version=version,
            parent=self._parent,
            step=self._learner.steps,
            epoch=self._epoch,
            base_model=str(self._settings.model.model_path),
            created_at=time.time(),
            dtype=self._settings.trainer_dtype,
            probe=probe,
            files=files,
            kind="lora" if self._settings.model.lora.rank else "full",
        )
