"""Takes a backup while the services run: one consistent cut through spool, ledger and checkpoints.

A record goes from its spool, or from there by the quarantine, into the ledger; a checkpoint is in its place before the
ledger names it. So what each comes from is copied before it: a record that moves on meanwhile is in both, and one that
is in the ledger already is not stored again. Checkpoints are held as of the moment of the ledger, before the trainer
can prune them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tuneloop.shared import VERSION
from tuneloop.shared.checkpoints.file_checks import check_files, files_at
from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused, FileRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.held_files import hold
from tuneloop.shared.job_marks import KEY, require_restored
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.dump import Row, Snapshot, open_snapshot
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.operations.backup_format import (
    CHECKPOINTS,
    FORMAT,
    SPOOL,
    BackupDraft,
    BackupManifest,
    OnBytes,
    SavedVersion,
    encode_rows,
    on_no_bytes,
    rows_path,
)
from tuneloop.shared.quarantine import keeping
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import QUARANTINE, flushed_of, segment_path, segments, slots

#: How often a cut is taken anew because the trainer published a version in that very moment.
_TRIES = 5

_SERVES = (VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION)


class _Moved(Exception):
    """A version that the cut names was pruned while it was taken."""


def back_up(
    settings: Settings, target: Path, *, clock: Callable[[], float] = time.time, on_bytes: OnBytes = on_no_bytes
) -> BackupManifest:
    """Write a backup into `target`, which must be free or empty; nothing of the experiment is changed.

    Raises FileRefused if the target cannot be written, EnvironmentRefused if the experiment cannot be backed up,
    LedgerUnavailable if its database is away. Nothing is left in `target` then.
    """
    require_restored(settings.job_dir)
    draft = BackupDraft(target, on_bytes)
    try:
        return _Backup(settings, draft, clock()).take()
    except OSError as error:
        raise FileRefused(
            f"the backup to {target} failed: {error}; nothing of it is left there, and nothing here was changed"
        ) from error
    finally:
        if not draft.published:
            draft.take_back()


class _Cut(NamedTuple):
    revision: str
    newest: int
    saved: list[SavedVersion]


class _Backup:
    def __init__(self, settings: Settings, draft: BackupDraft, cut_at: float) -> None:
        self._settings, self._draft, self._cut_at = settings, draft, cut_at
        self._schema = settings.buffer.trainer_input.experience_buffer.name
        self._rows: dict[str, int] = {}

    def take(self) -> BackupManifest:
        """All of it."""
        self._require_ledger()
        spool_bytes = sum(self._copy_slot(slot) for slot in slots(self._settings.spool_dir))
        if (key := self._settings.job_dir / KEY).exists():
            self._draft.copy(key, KEY)
        for number in range(_TRIES):
            try:
                cut = self._cut(last=number == _TRIES - 1)
                break
            except _Moved:
                continue
        manifest = BackupManifest(
            format=FORMAT,
            release=VERSION,
            project=self._settings.project,
            name=self._settings.name,
            cut_at=self._cut_at,
            revision=cut.revision,
            model=model_sizes(self._settings.model.model_path),
            newest=cut.newest,
            rows=self._rows,
            spool_bytes=spool_bytes,
            versions=tuple(cut.saved),
            files=tuple(self._draft.files),
        )
        self._draft.publish(manifest)
        return manifest

    def _require_ledger(self) -> None:
        there = revisions.current(self._settings.database_url, schema=self._schema)
        if there is None or not revisions.is_known(there):
            raise EnvironmentRefused(
                f"the database has the schema {there or 'of no release'}: there is nothing to back up yet, or another"
                " release has to do it"
            )

    # The spool.

    def _copy_slot(self, slot: Path) -> int:
        """Copy what the database may not have yet; how many bytes."""
        name, done = f"{SPOOL}/{slot.name}", flushed_of(slot)
        with suppress(FileNotFoundError):
            self._draft.copy(slot / "flushed", f"{name}/flushed")
        size = 0
        for number in segments(slot):
            path = segment_path(slot, number)
            if number >= done.segment:
                with suppress(FileNotFoundError):  # the database has all of it by now
                    size += self._draft.copy(path, f"{name}/{path.name}").size
        for path in sorted(slot.glob("*.torn")):
            with suppress(FileNotFoundError):
                self._draft.copy(path, f"{name}/{path.name}")
        if (slot / QUARANTINE).exists():  # after the segments: what they lose goes there
            with keeping(slot), suppress(FileNotFoundError):
                size += self._draft.copy(slot / QUARANTINE, f"{name}/{QUARANTINE}").size
        return size

    # The ledger and its checkpoints, as of one moment.

    def _cut(self, *, last: bool) -> _Cut:
        with open_snapshot(self._settings.database_url, schema=self._schema) as snapshot:
            rows = [dict(row) for row in snapshot.rows("versions")]
            wanted = {Path(row["path"]): row for row in rows if row["version"] and row["state"] in SERVABLE}
            with hold(self._settings.job_dir, list(wanted)) as holding:
                newest = max((row["version"] for row in wanted.values()), default=0)
                held = dict(_whole(wanted, holding))
                missing = [row["version"] for path, row in wanted.items() if path not in held and _must(row, newest)]
                if not last and (missing or self._has_moved(rows)):
                    raise _Moved
                if missing:
                    raise EnvironmentRefused(_sentence(missing[0]))
                self._copy_rows(snapshot)
                saved = [self._copy_version(path, row, holding) for path, row in held.items()]
            return _Cut(snapshot.revision or "", max((row["version"] for row in rows), default=0), saved)

    def _has_moved(self, rows: list[dict[str, Any]]) -> bool:
        """Whether another version was registered while the checkpoints of these were held."""
        with open_snapshot(self._settings.database_url, schema=self._schema) as snapshot:
            return snapshot.count("versions") != len(rows)

    def _copy_rows(self, snapshot: Snapshot) -> None:
        for table in snapshot.tables:
            self._draft.write(rows_path(table), encode_rows(self._count(table, snapshot.rows(table))))

    def _count(self, table: str, rows: Iterator[Row]) -> Iterator[Row]:
        self._rows[table] = 0
        for row in rows:
            self._rows[table] += 1
            yield row

    def _copy_version(self, path: Path, row: Mapping[str, Any], holding: Path) -> SavedVersion:
        held = holding / path.name
        for leaf in sorted(each for each in held.rglob("*") if each.is_file()):
            self._draft.copy(leaf, f"{CHECKPOINTS}/{path.name}/{leaf.relative_to(held)}")
        copy = self._draft.root / CHECKPOINTS / path.name
        try:
            check_files(copy, read_manifest(copy, sha256=row["manifest_sha256"]))
        except CheckpointRejected as error:
            raise EnvironmentRefused(
                f"checkpoint_root_dir: {path.parent}/{error}: {_sentence(row['version'])}"
            ) from None
        return SavedVersion(row["version"], path.name)


def _whole(wanted: Mapping[Path, Mapping[str, Any]], holding: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Those of which every file is held, by name and size."""
    for path, row in wanted.items():
        held = holding / path.name
        try:
            manifest = read_manifest(held, sha256=row["manifest_sha256"])
        except CheckpointRejected:
            continue
        if all((held / each.path).is_file() for each in files_at(held, manifest)):
            yield path, row


def _must(row: Mapping[str, Any], newest: int) -> bool:
    """Whether the experiment cannot go on without it: it serves or may, or the trainer goes on from it."""
    return row["state"] in _SERVES or bool(row.get("pinned")) or row["version"] == newest


def _sentence(version: int) -> str:
    return (
        f"version {version} is needed and its files are missing or damaged: restore them, or reject the version"
        " (`tuneloop versions reject`), then back up again"
    )


def model_sizes(folder: Path) -> dict[str, int]:
    """What tells a base model from another: the sizes in bytes of its configuration and weights."""
    files = [path for path in folder.glob("*") if path.suffix == ".safetensors" or path.name == "config.json"]
    return {path.name: path.stat().st_size for path in sorted(files)}
