"""Brings files to disk, and tells what is in them."""

import hashlib
import os
from pathlib import Path

from tuneloop.shared.checkpoints.manifest import File
from tuneloop.shared.errors import CheckpointRejected


def seal_file(path: Path, root: Path, mode: int) -> File:
    """Bring a staged file to disk with these rights, and describe it. Raises CheckpointRejected for a link."""
    name = str(path.relative_to(root))
    if path.is_symlink():
        raise CheckpointRejected(f"{name}: a checkpoint holds files, not links")
    path.chmod(mode)
    sync_folder(path)
    return File(path=name, size=path.stat().st_size, sha256=sha256_of(path))


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Bring a folder's names to disk (or a file's bytes)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
