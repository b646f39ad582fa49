"""What training resumes from: the newest weights, and the newest critic and optimiser that belong to them."""

from pathlib import Path

import structlog

from tuneloop.shared.checkpoints.file_checks import check_files, is_weights_only, newest_with_state
from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Version
from tuneloop.shared.ledger.versions.versions import SERVABLE, Versions

_log = structlog.get_logger()


def require_weights(version: Version, store: CheckpointStore) -> None:
    """Raise EnvironmentRefused unless all files of a registered version are those that were published."""
    try:
        _check(version, store)
    except CheckpointRejected as error:
        serves = version.state in {VersionState.CANARY, VersionState.CHAMPION}
        raise EnvironmentRefused(
            f"checkpoint_root_dir: the newest version is damaged, {version.path.parent}/{error}; restore that folder, "
            f"or give it up: tuneloop versions {'rollback' if serves else 'reject'} {version.version} --reason "
            "damaged; then start again"
        ) from error


def find_state(version: Version, versions: Versions, store: CheckpointStore) -> Path | None:
    """The folder whose critic and optimiser training resumes with: the version's own, or the nearest older one's.

    None if there is none that can be read.
    """
    if not is_weights_only(version.path):
        _log.info("state_resumed_from", version=version.version, behind=0)
        return version.path
    older = {
        each.version: each for each in versions.all() if 0 < each.version < version.version and each.state in SERVABLE
    }
    while older:
        newest = newest_with_state({number: each.path for number, each in older.items()}, upto=version.version)
        if not newest:
            return None
        found = older.pop(newest)
        try:
            _check(found, store)
        except CheckpointRejected as error:
            _log.warning("state_not_resumed", version=newest, reason=str(error))
            continue
        _log.warning("state_resumed_from", version=newest, behind=version.step - found.step)
        return found.path
    return None


def _check(version: Version, store: CheckpointStore) -> None:
    store.check_place(version.path)
    check_files(version.path, read_manifest(version.path, sha256=version.manifest_sha256))
