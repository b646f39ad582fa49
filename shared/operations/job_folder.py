"""Checks that the job folder belongs to this experiment, and that its file system has the needed functions."""

import ctypes
import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from tuneloop.shared.checkpoints import sync_folder
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.held_files import EXPERIMENT, expect_mark
from tuneloop.shared.job_marks import folder_mark, mark_folder
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.database_url import SETTING, parse_url
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

_INSTEAD = "name PostgreSQL, postgresql://user:password@host/database"


def claim_folder(job_dir: Path, ledger: Ledger) -> None:
    """Make the folder this experiment's, with a mark. Raises EnvironmentRefused where the ledger has another."""
    mark = folder_mark(job_dir)
    if mark is None and ledger.explorers.folder() is None:
        mark_folder(job_dir)
        mark = folder_mark(job_dir)
    if (known := ledger.explorers.folder(mark)) != mark:
        raise EnvironmentRefused(
            f"checkpoint_root_dir: {job_dir} is not the folder that the database knows: {EXPERIMENT} is not there, or"
            " is another's; mount the folder. If it is lost, restore a backup, or begin with an empty one: write"
            f" {known} into {job_dir / EXPERIMENT}"
        )
    expect_mark(job_dir)


def require_file_systems(settings: Settings) -> None:
    """Raise EnvironmentRefused, a sentence for each, for what the file systems cannot do. Before any work."""
    problems = [
        f"checkpoint_root_dir: the file system of {settings.job_dir} {lacking}; use a local disk or NFS, and copy"
        " versions to an object store from there"
        for lacking in find_lacking(settings.job_dir)
    ]
    file = _database_file(settings)
    kind, perhaps = network_of(file) if file else (None, None)
    if kind:
        problems.append(
            f"{SETTING}: {file} is on a network file system ({kind}), where SQLite can lose or damage what several"
            f" processes write; {_INSTEAD}, or where all services run on this machine a file on its own disk,"
            " sqlite:////folder/file.db"
        )
    if perhaps:
        sentence = f"{SETTING}: {file} is on {perhaps}. If that is a network's, SQLite can lose data: {_INSTEAD}"
        log.warning("sqlite_perhaps_on_network", sentence=sentence)
    if problems:
        raise EnvironmentRefused("\n".join(problems))


def require_one_host(settings: Settings, ledger: Ledger) -> None:
    """Raise EnvironmentRefused if a service of another machine uses the same SQLite file."""
    if (file := _database_file(settings)) is None or network_of(file) == (None, None):
        return
    if others := sorted(ledger.explorers.hosts() - {socket.gethostname()}):
        raise EnvironmentRefused(
            f"{SETTING}: {', '.join(others)} uses {file} too, and SQLite is for services of one machine; {_INSTEAD}"
        )


def _database_file(settings: Settings) -> Path | None:
    url = parse_url(settings.database_url)
    return Path(url.database or "").absolute() if url.get_backend_name() == "sqlite" else None


#: Of linux/magic.h and of their own headers: file systems that several machines write to.
_OF_NETWORKS = {
    **{0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "CIFS", 0x5346414F: "AFS", 0x6B414653: "AFS"},
    **{0x00C36400: "CephFS", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x19830326: "BeeGFS", 0x01161970: "GFS2"},
}
#: File systems that may be of a network or of this machine: the kernel does not say which.
_OF_EITHER = {0x65735546: "FUSE", 0x01021997: "9P", 0x786F4256: "VirtualBox"}

#: Of which a file system says nothing: whatever it can do, it has no room now.
_FULL = {errno.ENOSPC, errno.EDQUOT}

_LIBC = ctypes.CDLL(None, use_errno=True)


def network_of(path: Path) -> tuple[str | None, str | None]:
    """The kind of network file system that a path is on, and the kind of one that may be one; None: neither."""
    found = ctypes.create_string_buffer(512)  # More than any machine's statfs takes; the kind comes first.
    if _LIBC.statfs(os.fsencode(_existing_part(path)), found):
        return None, None
    kind = ctypes.c_ulong.from_buffer(found).value & 0xFFFF_FFFF
    return _OF_NETWORKS.get(kind), _OF_EITHER.get(kind)


def find_lacking(folder: Path) -> list[str]:
    """The functions that a job folder needs and its file system lacks, each as part of a sentence."""
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".trial-", dir=_existing_part(folder), ignore_cleanup_errors=True) as trial,
    ):
        return _refusals(Path(trial))
    return []


def _existing_part(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _refusals(trial: Path) -> list[str]:
    found: list[str] = []

    @contextmanager
    def attempt(need: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                found.append(f"cannot {need} ({error.strerror})")

    one, other, within = trial / "one", trial / "other", trial / "staged" / "file"
    with attempt("append to files"):
        for _ in range(2):
            with one.open("ab") as file:
                file.write(b"1")
    with attempt("sync files and folders"):
        sync_folder(one)
        sync_folder(trial)
    with attempt("make hard links"):
        os.link(one, other)
    with attempt("rename files over others"):
        other.write_bytes(b"2")
        os.replace(other, one)
    with attempt("rename folders"):
        within.parent.mkdir()
        within.write_bytes(b"1")
        os.rename(within.parent, trial / "whole")
    with attempt("lock files"), one.open("a+b") as first, one.open("a+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError(errno.ENOLCK, "two have the same lock")
    with attempt("change rights"):
        os.chmod(one, 0o640)
    return found
