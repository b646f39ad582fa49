"""Takes a backup into a plain folder while the services run, and puts one back into an empty job.

{folder}/outbox/*.records              what the outbox held: the database need not have it
{folder}/secrets/msg_id.key            the key that the names of replies are signed with
{folder}/ledger.db, ledger.pg_dump     the database, as of one moment
{folder}/checkpoints/global_step_{n}/  the versions that this database names
{folder}/files/{id}                    what clients uploaded to fine-tune on
{folder}/manifest.json                 what it is of, and the size of each file

A record goes from the outbox into the database. The outbox is copied first, so a record that moves on meanwhile is in
both; the database, which is copied with the numbers that it has of the outbox's files, takes it once. A version's files
are copied after the database that names it.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tuneloop.shared import VERSION
from tuneloop.shared.checkpoints import CheckpointStore, check_files, files_at, read_manifest, sync_folder
from tuneloop.shared.errors import CheckpointRejected, EnvironmentRefused, FileRefused
from tuneloop.shared.experience import VersionState
from tuneloop.shared.held_files import hold
from tuneloop.shared.job_marks import (
    KEY,
    SERVED,
    Restoring,
    begin_restoring,
    end_restoring,
    note_registered,
    require_restored,
    restoring_in,
)
from tuneloop.shared.ledger.facts import TRAINER_SEEN_S
from tuneloop.shared.ledger.files import FILES
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.dump import Snapshot, dump_name, load, open_snapshot
from tuneloop.shared.ledger.versions.versions import SERVABLE
from tuneloop.shared.operations.older_ledger import MIN_SKIPPED, registered_here, round_up
from tuneloop.shared.outbox_status import files_of, held_file, path_of
from tuneloop.shared.settings.settings import Settings

#: What this release writes, and reads.
FORMAT = 3

#: Why the version before the next one is none.
LEFT_OUT = "restored from a backup: versions up to this number may have been published after it"

#: How often a snapshot is taken again because the trainer pruned a version that it names in that very moment.
_TRIES = 5

_MANIFEST, _OUTBOX, _CHECKPOINTS = "manifest.json", "outbox", "checkpoints"
_SERVES = (VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION)


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup says of itself. All acknowledged until `cut_at` is in it; `model`: its files' sizes."""

    format: int
    release: str
    project: str
    name: str
    cut_at: float
    revision: str
    schema: str
    model: dict[str, int]
    newest: int
    versions: tuple[int, ...]
    files: dict[str, int]


class RestoreResult(NamedTuple):
    backup: BackupManifest
    next_version: int


def back_up(settings: Settings, target: Path, *, clock: Callable[[], float] = time.time) -> BackupManifest:
    """Write a backup into the new folder `target`; the experiment is unchanged, and a failure leaves `target` empty.

    Raises FileRefused for the target, EnvironmentRefused for the experiment, LedgerUnavailable without a database.
    """
    require_restored(settings.job_dir)
    schema, draft = settings.buffer.trainer_input.experience_buffer.name, target.with_name(f"{target.name}.partial")
    there = revisions.current(settings.database_url, schema=schema)
    if there is None or not revisions.is_known(there):
        raise EnvironmentRefused(
            f"the database has the schema {there or 'of no release'}: there is nothing to back up yet, or another"
            " release has to do it"
        )
    if target.exists():
        raise FileRefused(f"{target} is there already: give each backup a folder of its own")
    try:
        draft.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise FileRefused(f"{draft} is there: another backup writes it, or was killed; delete it then") from None
    except OSError as error:
        raise FileRefused(f"{draft}: cannot be written: {error.strerror}") from None
    try:
        cut_at = clock()
        for file in files_of(settings.outbox_dir):
            with suppress(FileNotFoundError):  # the database has all of it by now
                _copy(path_of(settings.outbox_dir, file), path_of(draft / _OUTBOX, file))
        if (key := settings.job_dir / KEY).exists():
            _copy(key, draft / KEY)
        for number in range(_TRIES):
            with open_snapshot(settings.database_url, schema=schema) as snapshot:
                newest, saved = _save(settings, snapshot, draft, last=number == _TRIES - 1)
            if saved is not None:
                break
        for upload in sorted((settings.job_dir / FILES).glob("*")):  # what the database names was there before
            with suppress(FileNotFoundError):  # deleted since
                _copy(upload, draft / FILES / upload.name)
        manifest = BackupManifest(
            format=FORMAT,
            release=VERSION,
            project=settings.project,
            name=settings.name,
            cut_at=cut_at,
            revision=there,
            schema=schema,
            model=_model_sizes(settings.model.model_path),
            newest=newest,
            versions=tuple(saved or ()),
            files={str(path.relative_to(draft)): path.stat().st_size for path in _files(draft)},
        )
        (draft / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in sorted(draft.rglob("*"), reverse=True):
            sync_folder(path)
        sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise FileRefused(
            f"the backup to {target} failed: {error}; nothing of it is left there, and nothing here was changed"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _save(settings: Settings, snapshot: Snapshot, draft: Path, *, last: bool) -> tuple[int, list[int] | None]:
    """Save database and versions as of one moment; the newest, and those saved, None if one was pruned meanwhile."""
    rows = list(snapshot.rows("versions"))
    wanted = {Path(row["path"]): row for row in rows if row["version"] and row["state"] in SERVABLE}
    newest = max((row["version"] for row in wanted.values()), default=0)
    with hold(settings.job_dir, list(wanted)) as holding:
        held: dict[Path, Mapping[str, Any]] = {}
        for path, row in wanted.items():
            with suppress(CheckpointRejected):
                there = read_manifest(holding / path.name, sha256=row["manifest_sha256"])
                if all((holding / path.name / each.path).is_file() for each in files_at(holding / path.name, there)):
                    held[path] = row
        for path, row in wanted.items():
            # The experiment cannot go on without it: it serves or may, or the trainer goes on from it.
            needed = row["state"] in _SERVES or row["pinned"] or row["version"] == newest
            if path not in held and needed:
                if not last:
                    return newest, None
                raise EnvironmentRefused(_missing(row["version"]))
        snapshot.save(draft / dump_name(settings.database_url))
        for path, row in held.items():
            copy = draft / _CHECKPOINTS / path.name
            shutil.copytree(holding / path.name, copy, copy_function=shutil.copyfile)
            try:
                check_files(copy, read_manifest(copy, sha256=row["manifest_sha256"]))
            except CheckpointRejected as error:
                raise EnvironmentRefused(
                    f"checkpoint_root_dir: {path.parent}/{error}: {_missing(row['version'])}"
                ) from None
    return max((row["version"] for row in rows), default=0), [row["version"] for row in held.values()]


def _missing(version: int) -> str:
    return (
        f"version {version} is needed and its files are missing or damaged: restore them, or reject the version"
        " (`tuneloop versions reject`), then back up again"
    )


def _model_sizes(folder: Path) -> dict[str, int]:
    files = [path for path in folder.glob("*") if path.suffix == ".safetensors" or path.name == "config.json"]
    return {path.name: path.stat().st_size for path in sorted(files)}


def check_backup(settings: Settings, root: Path) -> BackupManifest:
    """A backup's manifest. Raises FileRefused if it is not whole, EnvironmentRefused if it is of other settings."""
    try:
        found = msgspec.json.decode((root / _MANIFEST).read_bytes(), type=BackupManifest)
    except OSError as error:
        raise FileRefused(
            f"{root} is not a backup, or was not finished: {_MANIFEST}: {error.strerror}; take another one"
        ) from None
    except msgspec.MsgspecError as error:
        raise FileRefused(f"{root}: {_MANIFEST} is damaged ({error}): take another backup") from None
    if found.format > FORMAT or not revisions.is_known(found.revision):
        raise EnvironmentRefused(
            f"{root} has the schema {found.revision} of tuneloop {found.release}: install that release, or a newer one"
        )
    if (found.project, found.name) != (settings.project, settings.name):
        raise EnvironmentRefused(
            f"{root} is a backup of {found.project}/{found.name}, the settings are those of "
            f"{settings.project}/{settings.name}"
        )
    here = _model_sizes(settings.model.model_path)
    if here and found.model and here != found.model:
        raise EnvironmentRefused(
            f"model.model_path: {settings.model.model_path} is not the model that the versions of the backup come from:"
            f" {found.model} bytes then, {here} here"
        )
    dump, schema = dump_name(settings.database_url), settings.buffer.trainer_input.experience_buffer.name
    if dump not in found.files:
        raise EnvironmentRefused(f"{root} is of another kind of database: it has no {dump}; restore it to its own kind")
    if dump != "ledger.db" and schema != found.schema:
        raise EnvironmentRefused(f"{root} is of the schema {found.schema}: set {_SCHEMA_OPTION} to it, not {schema}")
    for name, size in found.files.items():
        path = root / name
        if not path.is_file() or path.stat().st_size != size:
            raise FileRefused(f"{root} is damaged: {name} has not its {size} bytes; take another backup")
    return found


_SCHEMA_OPTION = "buffer.trainer_input.experience_buffer.name"


def restore(
    settings: Settings,
    root: Path,
    *,
    next_version: int | None = None,
    clock: Callable[[], float] | None = None,
) -> RestoreResult:
    """Put a backup back where the settings say, where nothing is yet but an outbox, whose records the database gets."""
    manifest, job = check_backup(settings, root), settings.job_dir
    require_stopped(settings, clock)
    schema, interrupted = settings.buffer.trainer_input.experience_buffer.name, restoring_in(job)
    if interrupted is None:
        there = [str(path) for path in CheckpointStore(job).folders()]
        there += ["tables in the database"] if revisions.current(settings.database_url, schema=schema) else []
        if there:
            raise EnvironmentRefused(
                f"there is something here already: {', '.join(there)}; restore into another checkpoint_root_dir and"
                " database, or move these away"
            )
    elif interrupted.backup != str(root.absolute()):
        raise EnvironmentRefused(f"{job} is half restored from {interrupted.backup}: restore that again, or delete it")
    newest = max(manifest.newest, registered_here(job).version)
    if next_version is not None and next_version <= newest:
        raise EnvironmentRefused(
            f"--next-version: version {newest} was published already, so {next_version} cannot be next"
        )
    now = (clock or time.time)()
    try:
        job.mkdir(parents=True, exist_ok=True)
        begin_restoring(job, Restoring(str(root.absolute()), now))
        store = CheckpointStore(job, mode=int(settings.trainer.checkpoint_mode, 8))
        for folder in sorted((root / _CHECKPOINTS).glob("*")):
            store.put_back(folder)
        for file in files_of(root / _OUTBOX):
            saved, target = path_of(root / _OUTBOX, file), path_of(settings.outbox_dir, file)
            # What is there is the file itself, and longer than the copy, which was made while it was written.
            if not target.exists() or target.stat().st_size < saved.stat().st_size:
                _copy(saved, target)
        for path in _files(root / FILES):
            _copy(path, job / FILES / path.name)
        if (root / KEY).exists():
            _copy(root / KEY, job / KEY)
        (job / SERVED).unlink(missing_ok=True)
        load(
            settings.database_url,
            schema=schema,
            source=root / dump_name(settings.database_url),
            base=settings.model.model_path.absolute(),
            folder=job,
        )
        # One number for each second since the backup at least: no trainer publishes faster for long.
        skipped = max(MIN_SKIPPED, math.ceil(now - manifest.cut_at))
        last = round_up(newest + skipped) if next_version is None else next_version - 1
        epoch = registered_here(job).epoch + skipped
        with closing(Ledger.of(settings)) as ledger:
            numbers = ledger.restoration.begin_anew(version=last, epoch=epoch, reason=LEFT_OUT, path=store.path(last))
        note_registered(job, numbers.version, numbers.epoch)
        end_restoring(job)
    except OSError as error:
        raise FileRefused(
            f"the restore failed: {error}; cure that and give it again: no service starts before"
        ) from error
    return RestoreResult(manifest, numbers.version + 1)


def require_stopped(settings: Settings, clock: Callable[[], float] | None = None) -> None:
    """Raise EnvironmentRefused if a service of this experiment runs, as far as can be seen from here."""
    if (held := held_file(settings.outbox_dir)) is not None:
        raise EnvironmentRefused(f"an explorer runs: it holds {held}; stop all services first")
    schema = settings.buffer.trainer_input.experience_buffer.name
    # What an interrupted restore has put there is no trainer's, and none has started since.
    if restoring_in(settings.job_dir) or revisions.current(settings.database_url, schema=schema) is None:
        return
    with closing(Ledger.of(settings)) as ledger, open_snapshot(settings.database_url, schema=schema) as snapshot:
        now = (clock or ledger.transactions.time)()
        for row in snapshot.rows("epochs"):
            silent_s = max(0.0, now - row["seen_at"])
            if row["ended_at"] is None and silent_s <= TRAINER_SEEN_S:
                raise EnvironmentRefused(
                    f"trainer {row['trainer']} was seen {silent_s:.0f} s ago: stop all services first; one that was"
                    f" killed is forgotten after {TRAINER_SEEN_S:.0f} s"
                )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy(source: Path, target: Path) -> None:
    """Bring a copy to disk, to be read by us alone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.partial")
    with source.open("rb") as origin, open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as copy:
        shutil.copyfileobj(origin, copy)
    sync_folder(draft)
    draft.replace(target)
    sync_folder(target.parent)
