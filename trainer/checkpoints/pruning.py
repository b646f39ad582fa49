"""Which checkpoints stay, and which keep critic and optimiser."""

import structlog

from tuneloop.shared.checkpoints.file_checks import newest_with_state
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.versions.decisions import Versions
from tuneloop.shared.settings.settings import Settings

_log = structlog.get_logger()


def prune_by_settings(settings: Settings, store: CheckpointStore, versions: Versions, *, writing: int = 0) -> None:
    """Delete what the settings do not keep; the state of version `writing` is about to be written."""
    keeps = settings.trainer
    prune(store, versions, keep=keeps.max_checkpoints_to_keep, keep_interval=keeps.keep_interval, writing=writing)


def prune(
    store: CheckpointStore, versions: Versions, *, keep: int, keep_interval: int | None = None, writing: int = 0
) -> None:
    """Delete checkpoints but the last `keep`, and never one that is served, may be served, or is gone on from.

    `keep` 0 means all of them. Those of every `keep_interval`-th step stay, too, and what a rollback would go back to,
    if there is such a version. All keep their weights alone but the one that is gone on from, and the newest before it
    that has critic and optimiser, while it has none, and `writing`. A disk that refuses is no reason to stop training.
    """
    registered = versions.all()
    numbers = [each.version for each in registered]
    last = numbers[-keep:] if keep else numbers
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered if each.pinned or each.state in may_serve}
    gone_on_from = versions.newest().version
    milestones = {each.version for each in registered if keep_interval and each.step % keep_interval == 0}
    spared = {*last, *needed, *milestones, gone_on_from, versions.champion_before() or 0}
    places = {each.version: each.path for each in registered if each.version in spared}
    try:
        gone = store.prune(places.values(), newest=numbers[-1])
        for version in spared - {0, gone_on_from, newest_with_state(places, upto=gone_on_from), writing}:
            store.strip(places[version])
    except OSError as error:
        _log.warning("prune_failed", reason=str(error))
        return
    for path in gone:
        _log.info("version_pruned", folder=path.name)
