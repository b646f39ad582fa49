"""Whether a checkpoint's files are those of its manifest."""

import stat
from pathlib import Path

from tuneloop.shared.checkpoints.layout import MANIFEST, is_weights_only, leaves, stays
from tuneloop.shared.checkpoints.manifest import File, Manifest
from tuneloop.shared.checkpoints.sealing import sha256_of
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable


def files_at(path: Path, manifest: Manifest) -> list[File]:
    """The files of the manifest that must be in the folder: those that an older version is rid of need not be."""
    return [file for file in manifest.files if not is_weights_only(path) or stays(file.path)]


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless the files are exactly those of the manifest, below `folder` if given.

    Those that an older version is rid of need not be there.
    """
    top = path if folder is None else path / folder
    wanted = [file for file in files_at(path, manifest) if folder is None or file.path.startswith(f"{folder}/")]
    if not wanted:
        raise CheckpointRejected(f"{top.name} of {path.name}: the manifest names no file of it")
    for file in wanted:
        try:
            _check(path, file)
        except OSError as error:
            raise CheckpointUnreadable(f"{path.name}/{file.path}: {error.strerror}") from None
    # A loader takes what it finds, so no other file may be there. NFS keeps open files as .nfs*.
    found = {str(leaf.relative_to(path)) for leaf in leaves(top) if not leaf.name.startswith(".")}
    for extra in sorted(found - {file.path for file in manifest.files} - {MANIFEST}):
        raise CheckpointRejected(f"{path.name}/{extra}: the manifest does not name it")


def _check(path: Path, file: File) -> None:
    place = path / file.path
    status = place.lstat()
    if not stat.S_ISREG(status.st_mode) or place.resolve() != path.resolve() / file.path:
        raise CheckpointRejected(f"{path.name}/{file.path}: not a file of this folder, but a link or something else")
    if status.st_size != file.size:
        raise CheckpointRejected(f"{path.name}/{file.path}: {status.st_size} bytes, the manifest says {file.size}")
    if sha256_of(place) != file.sha256:
        raise CheckpointRejected(f"{path.name}/{file.path}: its sha256 is not the manifest's")
