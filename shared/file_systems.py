"""What file systems are, and what they cannot do: those of networks, and object stores that are mounted as folders."""

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from tuneloop.shared.checkpoints import sync_folder

#: Of linux/magic.h and of their own headers: file systems that several machines write to.
_OF_NETWORKS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x00C36400: "CephFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}
#: What may be of a network, or of this machine: it is not told which.
_OF_EITHER = {0x65735546: "FUSE", 0x01021997: "9P", 0x786F4256: "VirtualBox"}

#: Of which a file system says nothing: whatever it can do, it has no room now.
_FULL = {errno.ENOSPC, errno.EDQUOT}

_LIBC = ctypes.CDLL(None, use_errno=True)


def existing_part(path: Path) -> Path:
    """The path, or the nearest folder above it that there is."""
    return next(each for each in (path, *path.parents) if each.exists())


def network_of(path: Path) -> tuple[str | None, str | None]:
    """The kind of network file system that a path is on, and the kind of one that may be one; None: neither."""
    found = ctypes.create_string_buffer(512)  # More than any machine's statfs takes; the kind comes first.
    if _LIBC.statfs(os.fsencode(existing_part(path)), found):
        return None, None
    kind = ctypes.c_ulong.from_buffer(found).value & 0xFFFF_FFFF
    return _OF_NETWORKS.get(kind), _OF_EITHER.get(kind)


def find_lacking(folder: Path, needs: Collection[str] | None = None) -> list[str]:
    """What the file system of a folder cannot do of these needs, or all: a part of a sentence for each.

    It is tried in a folder inside, or above where there is none yet, which is gone afterwards. Where none can be made
    nothing is said.
    """
    try:
        trial = Path(tempfile.mkdtemp(prefix=".trial-", dir=existing_part(folder)))
    except OSError:
        return []
    try:
        found = []
        for need in _TRIALS if needs is None else needs:
            try:
                _TRIALS[need](trial)
            except OSError as error:
                if error.errno not in _FULL:
                    found.append(f"cannot {need} ({error.strerror or error})")
        return found
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _append(trial: Path) -> None:
    for _ in range(2):
        with (trial / "appended").open("ab") as file:
            file.write(b"1")


def _sync(trial: Path) -> None:
    with (trial / "synced").open("wb") as file:
        os.fsync(file.fileno())
    sync_folder(trial)


def _rename_files(trial: Path) -> None:
    for name in ("renamed", "older"):
        (trial / name).write_bytes(name.encode())
    (trial / "renamed").replace(trial / "older")
    if (trial / "older").read_bytes() != b"renamed":
        raise OSError(errno.EIO, "the older one is still there")


def _rename_folders(trial: Path) -> None:
    (trial / "staged").mkdir()
    (trial / "staged" / "file").write_bytes(b"1")
    (trial / "staged").rename(trial / "whole")


def _link(trial: Path) -> None:
    (trial / "first").write_bytes(b"1")
    os.link(trial / "first", trial / "second")


def _lock(trial: Path) -> None:
    with (trial / "locked").open("a+b") as one, (trial / "locked").open("a+b") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError(errno.ENOLCK, "two have the same lock")


def _change_rights(trial: Path) -> None:
    (trial / "private").write_bytes(b"1")
    (trial / "private").chmod(0o640)


#: What is done in a job folder, and a trial of it.
_TRIALS: dict[str, Callable[[Path], None]] = {
    "append to files": _append,
    "sync files and folders": _sync,
    "rename files over others": _rename_files,
    "rename folders": _rename_folders,
    "make hard links": _link,
    "lock files": _lock,
    "change rights": _change_rights,
}
#: What of it an outbox does.
OF_OUTBOXES = ("append to files", "sync files and folders", "lock files")
