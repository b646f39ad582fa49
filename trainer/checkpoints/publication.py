"""How a version comes into the world: all of it on disk, then its name, then its row; or nothing."""

import shutil
import time
from collections.abc import Collection
from pathlib import Path

import structlog
from safetensors import SafetensorError

from tuneloop.shared.checkpoint import CheckpointStore, File, Manifest, Probe
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.ledger.versions.decisions import Versions
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()


class Publication:
    """The learner as it is now, about to become the version after `parent`."""

    def __init__(
        self, settings: Settings, store: CheckpointStore, learner: Learner, *, epoch: int, parent: int
    ) -> None:
        self._settings, self._store, self._learner = settings, store, learner
        self._epoch, self._parent = epoch, parent

    def register(self, training: Training, ids: Collection[int]) -> int:
        """Publish and register the next version, made of the rows `ids`, and return its number.

        Raises EnvironmentRefused if the disk does not take it.
        """
        # Before the long work: a stale trainer stops here, a database that is away is noticed.
        training.extend(self._epoch)
        staging: Path | None = None
        try:
            staging = self._store.stage(self._epoch)
            self._check_room(staging)
            snapshot.save(self._learner, staging, base=self._settings.model.model_path)
            probe = snapshot.probe(self._learner, self._settings)
            sealed, files = staging, self._store.seal(staging)
            return training.register(
                self._epoch,
                ids,
                step=self._learner.steps,
                publish=lambda version: self._store.publish(sealed, self._manifest(version, probe, files)),
            )
        except (OSError, SafetensorError) as error:
            raise EnvironmentRefused(
                f"checkpoint_root_dir: cannot write a checkpoint to {self._settings.job_dir}: {error}; "
                "make room or give us the right to write there, and start the trainer again: nothing is lost"
            ) from error
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)

    def _check_room(self, staging: Path) -> None:
        needed, free = snapshot.size(self._learner), shutil.disk_usage(staging).free
        if needed > free:
            raise OSError(f"it needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free")

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


def prune(store: CheckpointStore, versions: Versions, *, keep: int) -> None:
    """Delete checkpoints but the last `keep`, and never one that is served, may be served, or is gone on from.

    `keep` 0 means all of them. What a rollback would go back to stays too, if there is such a version. A disk that
    refuses is no reason to stop training.
    """
    registered = versions.all()
    numbers = [each.version for each in registered]
    last = numbers[-keep:] if keep else numbers
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered if each.pinned or each.state in may_serve}
    # The number after the newest may be a checkpoint that a newer trainer is just registering.
    before = versions.champion_before() or 0
    spared = {*last, *needed, versions.newest().version, before, numbers[-1] + 1}
    try:
        gone = store.prune(spared)
    except OSError as error:
        _log.warning("prune_failed", reason=str(error))
        return
    for number in gone:
        _log.info("version_pruned", version=number)
