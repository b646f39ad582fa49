"""Which checkpoints stay, and which keep critic and optimiser; and from which of them training resumes."""

from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from tuneloop.shared.checkpoints.file_checks import check_files, is_weights_only, newest_with_state
from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.versions import SERVABLE, Versions, VersionsNow
from tuneloop.shared.settings.settings import Settings

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


#: Versions that are kept only because replies wait that they sampled. Those of older ones cannot be recomputed.
_WAITED_FOR = 8


def prune_by_settings(settings: Settings, store: CheckpointStore, ledger: Ledger, *, writing: int = 0) -> None:
    """Delete what the settings do not keep; the state of version `writing` is about to be written."""
    keeps, all_captured = settings.trainer, settings.explorer.capture.logprobs == "all"
    prune(
        store,
        ledger.versions,
        keep=keeps.max_checkpoints_to_keep,
        keep_interval=keeps.keep_interval,
        writing=writing,
        still_sampled=None if all_captured else ledger.training.versions_waiting,
    )


def prune(
    store: CheckpointStore,
    versions: Versions,
    *,
    keep: int,
    keep_interval: int | None = None,
    writing: int = 0,
    still_sampled: Callable[[Collection[int]], list[int]] | None = None,
) -> None:
    """Delete checkpoints but the last `keep`, and never one that is served, may be served, or is resumed from.

    `keep` 0 means all of them. Those of every `keep_interval`-th step stay, too, and what a rollback would go back to,
    if there is such a version, and what would be resumed from after a rollback or a rejection, and the newest
    _WAITED_FOR of those that `still_sampled` says replies wait of, which may have to be recomputed. All keep their
    weights alone but the one that is resumed from, and the newest before it that has critic and optimiser, while it has
    none, and `writing`. A disk that refuses is no reason to stop training.
    """
    seen = versions.now()
    numbers = [each.version for each in seen.versions]
    milestones = {each.version for each in seen.versions if keep_interval and each.step % keep_interval == 0}
    spared = {*_must_stay(seen), *(numbers[-keep:] if keep else numbers), *milestones}
    if still_sampled is not None:
        others = [each.version for each in seen.versions if each.version not in spared and each.path.exists()]
        spared |= set(sorted(still_sampled(others))[-_WAITED_FOR:])
    resumable = {each.version: each.path for each in seen.versions if each.state in SERVABLE}
    spared.add(with_state := newest_with_state(resumable, upto=seen.newest))
    aside: dict[Path, Path] = {}
    try:
        with versions.hold() as now:  # Meanwhile somebody may have decided otherwise.
            spared |= _must_stay(now)
            places = {each.version: each.path for each in now.versions if each.version in spared}
            aside.update(store.put_aside(places.values(), newest=seen.versions[-1].version))
        for version in spared - {0, now.newest, with_state, writing}:
            store.strip(places[version])
    except OSError as error:
        _log.warning("prune_failed", reason=str(error))
    finally:
        for folder, garbage in aside.items():
            store.delete(garbage)
            _log.info("version_pruned", folder=folder.name)


def _must_stay(registered: VersionsNow) -> set[int]:
    """What serves, may serve, or is resumed from, now or after a rollback or a rejection."""
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered.versions if each.pinned or each.state in may_serve}
    needed |= {registered.newest, registered.champion_before or 0}
    return needed | {registered.newest_without(version) for version in needed}
