"""Puts a backup back: all of it is read and found whole first, and no service can start on half of it."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tuneloop.shared.checkpoints.sealing import sync_folder
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.errors import EnvironmentRefused, FileRefused
from tuneloop.shared.job_marks import (
    KEY,
    SERVED,
    Restoring,
    begin_restoring,
    end_restoring,
    note_registered,
    restoring_in,
)
from tuneloop.shared.ledger.facts import TRAINER_SEEN_S
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.dump import Row, count_rows, drop_tables, load_rows, open_snapshot
from tuneloop.shared.ledger.training.restoration import LASTING
from tuneloop.shared.operations.backup import model_sizes
from tuneloop.shared.operations.backup_format import (
    CHECKPOINTS,
    SPOOL,
    BackupManifest,
    OnBytes,
    decode_rows,
    on_no_bytes,
    pieces,
    read_backup,
    rows_path,
    verify_backup,
)
from tuneloop.shared.operations.older_ledger import MIN_SKIPPED, offer_again, registered_here, round_up
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import QUARANTINE, backlog_of, is_taken, size_of, slots

#: Why the version before the next one is none.
LEFT_OUT = "restored from a backup: versions up to this number may have been published after it"


#: Below the job folder: what the database that is replaced knew of what must not be undone.
_LASTING_ROWS = "restoring.rows"


class RestoreResult(NamedTuple):
    """What was put back, and the number that the next version gets."""

    backup: BackupManifest
    next_version: int


def check_backup(settings: Settings, root: Path, on_bytes: OnBytes = on_no_bytes) -> BackupManifest:
    """Read all of a backup. Raises FileRefused if it is not whole, EnvironmentRefused if it is of other settings."""
    manifest = read_backup(root)
    if (manifest.project, manifest.name) != (settings.project, settings.name):
        raise EnvironmentRefused(
            f"{root} is a backup of {manifest.project}/{manifest.name}, the settings are those of "
            f"{settings.project}/{settings.name}"
        )
    if not revisions.is_known(manifest.revision):
        raise EnvironmentRefused(
            f"{root} has the schema {manifest.revision} of tuneloop {manifest.release}: install that release, or"
            " a newer one"
        )
    _require_same_model(settings, manifest)
    verify_backup(root, manifest, on_bytes)
    return manifest


def restore(
    settings: Settings,
    root: Path,
    *,
    replace: bool = False,
    next_version: int | None = None,
    clock: Callable[[], float] | None = None,
    on_bytes: OnBytes = on_no_bytes,
) -> RestoreResult:
    """Put a backup back where the settings say; `replace` what is there. Nothing is changed before it is found whole.

    The next version gets the number `next_version`, or one that no version published since the backup can have had.
    Raises FileRefused or EnvironmentRefused. Interrupted, it is given again: until it has ended no service starts.
    """
    manifest = check_backup(settings, root, on_bytes)
    require_stopped(settings, clock)
    there = list(_contents(settings))
    if there and not replace and restoring_in(settings.job_dir) is None:
        raise EnvironmentRefused(
            f"there is something here already: {', '.join(there)}; `--replace` puts the backup in its place"
        )
    before = max(manifest.newest, registered_here(settings.job_dir).version)
    if next_version is not None and next_version <= before:
        raise EnvironmentRefused(
            f"--next-version: version {before} was published already, so {next_version} cannot be next"
        )
    try:
        return _Restore(settings, root, manifest, (clock or time.time)(), on_bytes).run(next_version)
    except OSError as error:
        raise FileRefused(
            f"the restore failed: {error}; cure that and give it again: no service starts before"
        ) from error


class _Restore:
    def __init__(self, settings: Settings, root: Path, manifest: BackupManifest, now: float, on_bytes: OnBytes) -> None:
        self._settings, self._root, self._manifest, self._now = settings, root, manifest, now
        self._on_bytes = on_bytes
        self._schema = settings.buffer.trainer_input.experience_buffer.name
        self._job = settings.job_dir
        self._lasting = settings.job_dir / _LASTING_ROWS

    def run(self, next_version: int | None) -> RestoreResult:
        """All of it."""
        self._job.mkdir(parents=True, exist_ok=True)
        if restoring_in(self._job) is None:
            self._lasting.unlink(missing_ok=True)
        begin_restoring(self._job, Restoring(str(self._root.absolute()), self._now))
        self._put_checkpoints()
        self._put_spool()
        self._put_key()
        (self._job / SERVED).unlink(missing_ok=True)
        self._put_rows()
        following = self._number_on(next_version)
        self._lasting.unlink(missing_ok=True)
        end_restoring(self._job)
        return RestoreResult(self._manifest, following)

    def _put_checkpoints(self) -> None:
        store = CheckpointStore(self._job, mode=int(self._settings.trainer.checkpoint_mode, 8))
        for each in self._manifest.versions:
            store.put_back(
                self._root / CHECKPOINTS / each.folder,
                copied=lambda count: self._on_bytes("restoring the checkpoints", count),
            )

    def _put_spool(self) -> None:
        """Beside what is there: it was acknowledged, too. Records that the ledger has are not stored again."""
        top = self._settings.spool_dir
        top.mkdir(parents=True, exist_ok=True)
        number = 1 + max([-1, *(int(slot.name) for slot in slots(top))])
        names = {file.path.split("/")[1] for file in self._manifest.files if file.path.startswith(f"{SPOOL}/")}
        for name in sorted(names, key=int):
            self._copy_folder(self._root / SPOOL / name, top / str(number))
            number += 1
        sync_folder(top)

    def _put_key(self) -> None:
        if (self._root / KEY).exists():
            self._copy_file(self._root / KEY, self._job / KEY)

    def _copy_folder(self, source: Path, target: Path) -> None:
        for leaf in sorted(path for path in source.iterdir() if path.is_file()):
            self._copy_file(leaf, target / leaf.name)

    def _copy_file(self, source: Path, target: Path) -> None:
        with source.open("rb") as origin:
            self._write(target, pieces(origin))

    def _write(self, target: Path, data: Iterable[bytes]) -> None:
        """Bring it to disk, to be read by us alone."""
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.partial")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for piece in data:
                file.write(piece)
                self._on_bytes("restoring the spool", len(piece))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        sync_folder(target.parent)

    def _put_rows(self) -> None:
        url = self._settings.database_url
        if revisions.current(url, schema=self._schema) is not None:
            self._note_lasting()
            drop_tables(url, schema=self._schema)
        load_rows(url, schema=self._schema, revision=self._manifest.revision, rows=self._rows)

    def _note_lasting(self) -> None:
        """Bring to disk what must be done again, before it is dropped; what an interrupted restore noted stays.

        Another experiment's people are not ours.
        """
        if self._lasting.exists():
            return
        noted = {}
        with open_snapshot(self._settings.database_url, schema=self._schema) as snapshot:
            owners = list(snapshot.rows("experiment")) if "experiment" in snapshot.tables else []
            ours = (self._manifest.project, self._manifest.name)
            is_ours = all((row["project"], row["name"]) == ours for row in owners)
            for table in LASTING.keys() & set(snapshot.tables) if is_ours else ():
                noted[table] = [{name: row[name] for name in LASTING[table]} for row in snapshot.rows(table)]
        self._write(self._lasting, [msgspec.msgpack.encode(noted)])

    def _rows(self, table: str) -> Iterator[Row]:
        for row in decode_rows(self._root / rows_path(table), self._on_bytes):
            yield self._here(row) if table == "versions" else row

    def _here(self, row: Mapping[str, Any]) -> Row:
        """A version's row with the path that it has here."""
        base = self._settings.model.model_path.absolute()
        return {**row, "path": str(self._job / Path(row["path"]).name if row["version"] else base)}

    def _number_on(self, next_version: int | None) -> int:
        """Leave out the numbers that may have been given since the backup; the next one."""
        ledger, seen = Ledger.of(self._settings), registered_here(self._job)
        # One for each second since the backup at least: no trainer publishes faster for long.
        skipped = max(MIN_SKIPPED, math.ceil(self._now - self._manifest.cut_at))
        last = round_up(max(seen.version, self._manifest.newest) + skipped)
        if next_version is not None:
            last = next_version - 1
        with closing(ledger):
            if self._lasting.exists():
                ledger.restoration.redo(msgspec.msgpack.decode(self._lasting.read_bytes()))
            offer_again(self._settings.spool_dir, ledger)
            now = ledger.restoration.begin_anew(
                version=last,
                epoch=seen.epoch + skipped,
                reason=LEFT_OUT,
                path=CheckpointStore(self._job).path(last),
            )
        note_registered(self._job, now.version, now.epoch)
        return now.version + 1


def require_stopped(settings: Settings, clock: Callable[[], float] | None = None) -> None:
    """Raise EnvironmentRefused if a service of this experiment runs, as far as can be seen from here.

    By the ledger's time, unless there is a `clock`.
    """
    taken = [slot for slot in slots(settings.spool_dir) if is_taken(slot)]
    if taken:
        raise EnvironmentRefused(f"an explorer runs: it holds {taken[0]}; stop all services first")
    schema = settings.buffer.trainer_input.experience_buffer.name
    # What an interrupted restore has put there is no trainer's, and none has started since.
    if restoring_in(settings.job_dir) or revisions.current(settings.database_url, schema=schema) is None:
        return
    with open_snapshot(settings.database_url, schema=schema) as snapshot:
        now = (clock or partial(_time, settings))()
        for row in snapshot.rows("epochs"):
            silent_s = max(0.0, now - row["seen_at"])
            if row["ended_at"] is None and silent_s <= TRAINER_SEEN_S:
                raise EnvironmentRefused(
                    f"trainer {row['trainer']} was seen {silent_s:.0f} s ago: stop all services first; one that was"
                    f" killed is forgotten after {TRAINER_SEEN_S:.0f} s"
                )


def _time(settings: Settings) -> float:
    """The ledger's time, by which trainers are seen."""
    with closing(Ledger.of(settings)) as ledger:
        return ledger.transactions.time()


def _require_same_model(settings: Settings, manifest: BackupManifest) -> None:
    here = model_sizes(settings.model.model_path)
    if here and manifest.model and here != manifest.model:
        raise EnvironmentRefused(
            f"model.model_path: {settings.model.model_path} is not the model that the versions of the backup come from:"
            f" {manifest.model} bytes then, {here} here"
        )


def _contents(settings: Settings) -> Iterator[str]:
    """What a restore would replace."""
    if rows := _rows_there(settings):
        yield f"{sum(rows.values())} rows in the database"
    if folders := CheckpointStore(settings.job_dir).folders():
        yield f"{len(folders)} checkpoints in {settings.job_dir}"
    if waiting := sum(backlog_of(slot) + size_of(slot / QUARANTINE) for slot in slots(settings.spool_dir)):
        yield f"{waiting} bytes in {settings.spool_dir}"


def _rows_there(settings: Settings) -> dict[str, int]:
    """The rows of each table, without making a database."""
    schema = settings.buffer.trainer_input.experience_buffer.name
    if revisions.current(settings.database_url, schema=schema) is None:
        return {}
    return count_rows(settings.database_url, schema=schema)
