"""Whether a checkpoint's files are those of its manifests."""

import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tuneloop.shared.checkpoints.layout import (
    MANIFEST,
    STATE_MANIFEST,
    goes,
    is_marked_weights_only,
    leaves,
    stays,
)
from tuneloop.shared.checkpoints.manifest import File, Manifest, read_manifest, read_state_manifest
from tuneloop.shared.checkpoints.sealing import sha256_of
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable

#: Files that are read and hashed at once.
_READERS = 8


def is_weights_only(path: Path) -> bool:
    """Whether the version in `path` is without critic and optimiser: not written yet, or deleted, or about to be."""
    try:
        return not _state_files(path, read_manifest(path))
    except CheckpointRejected:
        return True


def newest_with_state(places: Mapping[int, Path], *, upto: int) -> int:
    """The newest version up to `upto` that has critic and optimiser, of those in these folders; 0 if none has."""
    versions = sorted((version for version in places if 0 < version <= upto), reverse=True)
    return next((version for version in versions if not is_weights_only(places[version])), 0)


def files_at(path: Path, manifest: Manifest) -> list[File]:
    """The files that must be in the folder: critic and optimiser only where it has them."""
    return [*(file for file in manifest.files if stays(file.path)), *_state_files(path, manifest)]


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless the files are exactly those of the manifests, below `folder` if given."""
    top = path if folder is None else path / folder
    files = files_at(path, manifest)
    wanted = [file for file in files if folder is None or file.path.startswith(f"{folder}/")]
    if not wanted:
        raise CheckpointRejected(f"{top.name} of {path.name}: the manifest names no file of it")
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda file: _read_and_check(path, file), wanted))
    # A loader takes what it finds, so no other file may be there. NFS keeps open files as .nfs*.
    found = {str(leaf.relative_to(path)) for leaf in leaves(top) if not leaf.name.startswith(".")}
    known = {file.path for file in files} | {MANIFEST, STATE_MANIFEST}
    if all(stays(name) for name in known - {MANIFEST, STATE_MANIFEST}):
        # Critic and optimiser that were not all put there when a trainer died, or not all deleted: nothing reads them.
        found = {name for name in found if not goes(name)}
    for extra in sorted(found - known):
        raise CheckpointRejected(f"{path.name}/{extra}: the manifest does not name it")


def _state_files(path: Path, manifest: Manifest) -> tuple[File, ...]:
    if is_marked_weights_only(path):
        return ()
    if (state := read_state_manifest(path)) is not None:
        return state.files
    # Of a release in which one manifest listed everything.
    return tuple(file for file in manifest.files if not stays(file.path))


def _read_and_check(path: Path, file: File) -> None:
    try:
        place = path / file.path
        status = place.lstat()
        if not stat.S_ISREG(status.st_mode) or place.resolve() != path.resolve() / file.path:
            raise CheckpointRejected(
                f"{path.name}/{file.path}: not a file of this folder, but a link or something else"
            )
        if status.st_size != file.size:
            raise CheckpointRejected(f"{path.name}/{file.path}: {status.st_size} bytes, the manifest says {file.size}")
        if sha256_of(place) != file.sha256:
            raise CheckpointRejected(f"{path.name}/{file.path}: its sha256 is not the manifest's")
    except FileNotFoundError as error:
        raise CheckpointRejected(f"{path.name}/{file.path}: {error.strerror}") from None
    except OSError as error:
        raise CheckpointUnreadable(f"{path.name}/{file.path}: {error.strerror}") from None
