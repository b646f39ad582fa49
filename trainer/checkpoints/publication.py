"""How a version comes into the world: all of it on disk, then its name, then its row; or nothing."""

import errno
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog
from safetensors import SafetensorError

from tuneloop.shared.checkpoints.manifest import File, Manifest, Probe
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.disk_space import DiskSpace, measure_space
from tuneloop.shared.errors import DiskFull, EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.job_marks import note_registered
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.ledger.versions.decisions import Versions
from tuneloop.shared.operations.diagnosis import DISK_FULL
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()

#: Versions that are kept only because replies wait that they sampled. Those of older ones cannot be recomputed.
_WAITED_FOR = 8


class Publisher:
    """Publishes under one epoch. Where a checkpoint does not fit, that is an alarm, and another try later.

    `took_s`: the seconds that the last version took.
    """

    def __init__(self, settings: Settings, ledger: Ledger, store: CheckpointStore, *, epoch: int) -> None:
        self._settings, self._ledger, self._store, self._epoch = settings, ledger, store, epoch
        self._alarm_may_be_open = True  # an earlier trainer's
        self.took_s = 0.0

    def publish(self, learner: Learner, ids: Collection[int], *, parent: int) -> int | None:
        """Publish and register the version after `parent`, made of the rows `ids`; None: there is no room for it.

        What is not needed any more is deleted first. Raises EnvironmentRefused if the disk refuses for another reason.
        """
        training, started = self._ledger.training, time.perf_counter()
        # Before the long work: a stale trainer stops here, a database that is away is noticed.
        training.extend(self._epoch)
        keeps = self._settings.trainer
        prune(
            self._store,
            self._ledger.versions,
            keep=keeps.max_checkpoints_to_keep,
            keep_interval=keeps.keep_interval,
            still_sampled=None if self._settings.explorer.capture.logprobs == "all" else training.versions_waiting,
        )
        try:
            version = Publication(self._settings, self._store, learner, epoch=self._epoch, parent=parent).register(
                training, ids
            )
        except DiskFull as error:
            if self._ledger.alarms.raise_alarm(Alarm(name=DISK_FULL, reason=str(error), step=learner.steps)):
                _log.error("waiting_for_room", reason=str(error))
            self._alarm_may_be_open = True
            return None
        self._note(version)
        if self._alarm_may_be_open and self._ledger.alarms.clear(DISK_FULL):
            _log.info("disk_space_restored", version=version)
        self._alarm_may_be_open = False
        self.took_s = time.perf_counter() - started
        _log.info("version_published", version=version, step=learner.steps, seconds=round(self.took_s, 3))
        for sentence in self._ledger.reports.imbalance():
            _log.error("ledger_out_of_balance", reason=sentence, version=version)
        return version

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

    def register(self, training: Training, ids: Collection[int]) -> int:
        """Publish and register the next version, made of the rows `ids`, and return its number.

        Raises DiskFull if it does not fit, EnvironmentRefused if the disk does not take it for another reason.
        """
        staging: Path | None = None
        try:
            self._require_room()
            staging = self._store.stage(self._epoch)
            snapshot.save(self._learner, staging, base=self._settings.model.model_path)
            put = self._seal(staging, training.next_version())
            return training.register(self._epoch, ids, step=self._learner.steps, publish=put)
        except (OSError, SafetensorError) as error:
            training.extend(self._epoch)  # A newer trainer has moved away what this one was writing.
            if _is_full(error):
                raise DiskFull(f"{error}; {self._space().sentence}") from error
            raise EnvironmentRefused(
                f"checkpoint_root_dir: cannot write a checkpoint to {self._settings.job_dir}: {error}; "
                "make room or give us the right to write there, and start the trainer again: nothing is lost"
            ) from error
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)

    def _seal(self, staging: Path, expected: int) -> Callable[[int], tuple[Path, str]]:
        """Bring all of `staging` to disk; what then gives it its name, and is quick if that is `expected`."""
        probe, files = snapshot.probe(self._learner, self._settings), self._store.seal(staging)
        # Not within the transaction: a disk may be slower than the database is patient.
        sha256 = self._store.describe(staging, self._manifest(expected, probe, files))

        def put(version: int) -> tuple[Path, str]:
            same = version == expected
            told = sha256 if same else self._store.describe(staging, self._manifest(version, probe, files))
            return self._store.put(staging, version), told

        return put

    def _require_room(self) -> None:
        if (space := self._space()).missing:
            raise DiskFull(space.sentence)

    def _space(self) -> DiskSpace:
        return measure_space(self._settings.job_dir, needed=snapshot.size(self._learner))

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


def prune(
    store: CheckpointStore,
    versions: Versions,
    *,
    keep: int,
    keep_interval: int | None = None,
    still_sampled: Callable[[Collection[int]], list[int]] | None = None,
) -> None:
    """Delete checkpoints but the last `keep`, and never one that is served, may be served, or is resumed from.

    `keep` 0 means all of them. Those of every `keep_interval`-th step stay, too, and what a rollback would go back to,
    if there is such a version, and the newest _WAITED_FOR of those that `still_sampled` says replies wait of, which may
    have to be recomputed. All but the one that is resumed from keep their weights alone. A disk that refuses is no
    reason to stop training.
    """
    registered = versions.all()
    numbers = [each.version for each in registered]
    last = numbers[-keep:] if keep else numbers
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered if each.pinned or each.state in may_serve}
    gone_on_from = versions.newest().version
    milestones = {each.version for each in registered if keep_interval and each.step % keep_interval == 0}
    spared = {*last, *needed, *milestones, gone_on_from, versions.champion_before() or 0}
    if still_sampled is not None:
        others = [each.version for each in registered if each.version not in spared and each.path.exists()]
        spared |= set(sorted(still_sampled(others))[-_WAITED_FOR:])
    places = {each.version: each.path for each in registered if each.version in spared}
    try:
        gone = store.prune(places.values(), newest=numbers[-1])
        for version in spared - {0, gone_on_from}:
            store.strip(places[version])
    except OSError as error:
        _log.warning("prune_failed", reason=str(error))
        return
    for path in gone:
        _log.info("version_pruned", folder=path.name)


def _is_full(error: Exception) -> bool:
    """Whether the disk, or the user's share of it, is full. safetensors tells the number in words only."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(f"os error {number})" in str(error) for number in numbers)
