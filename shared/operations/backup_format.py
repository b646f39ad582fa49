"""A backup on disk: one folder, complete if and only if its manifest is there.

backup.json                        the manifest, written last: what of which experiment, and every file's sha256
ledger/{table}.rows                frames as in the spool, each some rows of a table in msgpack
spool/{slot}/                      what a slot of the spool held that the ledger's rows need not have
checkpoints/global_step_{version}/ a version's folder as it was published
secrets/msg_id.key                 the key that the names of replies are signed with
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tuneloop.shared.checkpoints.manifest import File
from tuneloop.shared.checkpoints.sealing import sync_folder
from tuneloop.shared.errors import FileRefused
from tuneloop.shared.ledger.storage.dump import Row
from tuneloop.shared.spool_format import frame, next_payload

#: What this release writes, and reads.
FORMAT = 1

LEDGER, SPOOL, CHECKPOINTS = "ledger", "spool", "checkpoints"

#: Called with what is being done, and with how many more bytes of it are, whenever some are.
OnBytes = Callable[[str, int], object]

_MANIFEST = "backup.json"
_PIECE = 1 << 20
_ROWS_IN_A_FRAME = 100


def on_no_bytes(stage: str, count: int) -> None:
    """Nobody looks."""


class SavedVersion(msgspec.Struct, frozen=True):
    """A version whose folder is in the backup."""

    version: int
    folder: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup says of itself.

    `cut_at` (seconds since 1970): all that was acknowledged until then is in it. `revision` is the schema's, `newest`
    the newest version that was registered, `model` the sizes in bytes of the base model's files, which are not in it.
    """

    format: int
    release: str
    project: str
    name: str
    cut_at: float
    revision: str
    model: dict[str, int]
    newest: int
    rows: dict[str, int]
    spool_bytes: int
    versions: tuple[SavedVersion, ...]
    files: tuple[File, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)


class _Sealed(msgspec.Struct, frozen=True):
    """The manifest's own proof."""

    sha256: str
    backup: msgspec.Raw


class BackupDraft:
    """A backup in the making. Raises OSError where the disk refuses."""

    def __init__(self, root: Path, on_bytes: OnBytes = on_no_bytes) -> None:
        """Raises FileRefused unless `root` is free or an empty folder."""
        self.root = root
        self._on_bytes = on_bytes
        self.files: list[File] = []
        #: Whether it has become a backup.
        self.published = False
        try:
            root.mkdir(parents=True, exist_ok=True)
            taken = any(root.iterdir())
            if not taken:
                root.chmod(0o700)
        except OSError as error:
            raise FileRefused(f"{root}: cannot be written: {error.strerror}") from None
        if taken:
            raise FileRefused(f"{root} is not empty: give each backup a folder of its own; delete an unfinished one")

    def write(self, name: str, data: Iterable[bytes]) -> File:
        """Write a file of the backup and bring it to disk."""
        path, digest, size = self.root / name, hashlib.sha256(), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for piece in data:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                self._on_bytes("writing the backup", len(piece))
            file.flush()
            os.fsync(file.fileno())
        self.files.append(found := File(path=name, size=size, sha256=digest.hexdigest()))
        return found

    def take_back(self) -> None:
        """Delete everything that was written, and the folder."""
        shutil.rmtree(self.root, ignore_errors=True)

    def copy(self, source: Path, name: str) -> File:
        """Copy a file into the backup. Raises FileNotFoundError if it has gone."""
        with source.open("rb") as file:
            return self.write(name, pieces(file))

    def publish(self, manifest: BackupManifest) -> None:
        """Make it a backup: everything is on disk before the manifest has its name."""
        for folder in {parent for file in self.files for parent in (self.root / file.path).parents}:
            if folder.is_relative_to(self.root):
                sync_folder(folder)
        inner = msgspec.json.encode(manifest)
        sealed = _Sealed(hashlib.sha256(inner).hexdigest(), msgspec.Raw(inner))
        draft = self.root / f".{_MANIFEST}"
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(sealed))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.root / _MANIFEST)
        self.published = True
        sync_folder(self.root)
        sync_folder(self.root.parent)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, some at a time."""
    while piece := file.read(_PIECE):
        yield piece


def read_backup(root: Path) -> BackupManifest:
    """The manifest of a backup. Raises FileRefused if there is none, or it is damaged or a later format's."""
    try:
        sealed = msgspec.json.decode((root / _MANIFEST).read_bytes(), type=_Sealed)
        if hashlib.sha256(bytes(sealed.backup)).hexdigest() != sealed.sha256:
            raise msgspec.MsgspecError("its sha256 is another")
        found = msgspec.json.decode(sealed.backup, type=BackupManifest)
    except OSError as error:
        raise FileRefused(
            f"{root} is not a backup, or was not finished: {_MANIFEST}: {error.strerror}; take another one"
        ) from None
    except msgspec.MsgspecError as error:
        raise FileRefused(f"{root}: {_MANIFEST} is damaged ({error}): take another backup") from None
    if found.format > FORMAT:
        raise FileRefused(f"{root} was made by tuneloop {found.release}: install that release, or a newer one")
    return found


def verify_backup(root: Path, manifest: BackupManifest, on_bytes: OnBytes = on_no_bytes) -> None:
    """Read every file. Raises FileRefused unless all are as they were written."""
    for each in manifest.files:
        try:
            sha256 = hashlib.sha256()
            with (root / each.path).open("rb") as file:
                for piece in pieces(file):
                    sha256.update(piece)
                    on_bytes("checking the backup", len(piece))
        except OSError as error:
            raise FileRefused(f"{root} is damaged: {each.path}: {error.strerror}; take another backup") from None
        if sha256.hexdigest() != each.sha256:
            raise FileRefused(f"{root} is damaged: {each.path}: its sha256 is another; take another backup")


def rows_path(table: str) -> str:
    """The file of a table's rows."""
    return f"{LEDGER}/{table}.rows"


def encode_rows(rows: Iterable[Row]) -> Iterator[bytes]:
    """Rows as the bytes of a file: a frame with the names of the columns, then frames of rows."""
    rest = iter(rows)
    first = list(islice(rest, 1))
    if first:
        yield frame(msgspec.msgpack.encode(list(first[0])))
    while some := [*first, *islice(rest, _ROWS_IN_A_FRAME)]:
        first = []
        yield frame(msgspec.msgpack.encode([list(row.values()) for row in some]))


def decode_rows(path: Path, on_bytes: OnBytes = on_no_bytes) -> Iterator[Mapping[str, Any]]:
    """The rows in such a file. Raises FileRefused if it ends in the middle of something."""
    size = path.stat().st_size
    with path.open("rb") as file:
        columns: list[str] | None = None
        while file.tell() < size:
            payload = next_payload(file)
            if payload is None:
                raise FileRefused(f"{path} is damaged: take another backup")
            on_bytes("restoring the rows", len(payload))
            if columns is None:
                columns = msgspec.msgpack.decode(payload, type=list[str])
                continue
            for values in msgspec.msgpack.decode(payload, type=list[list[Any]]):
                yield dict(zip(columns, values, strict=True))
