"""Holds files by hard links while they are copied, so that another process's deletion loses nothing.

{root}/.holding-*/    the links, and `lock`, which the copying process holds
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_HOLDING = ".holding-"


def new_unlinked(path: Path) -> BinaryIO:
    """Make a file to write in that only we may read, where there is none, and no link either. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")


@contextmanager
def hold(root: Path, folders: Collection[Path]) -> Iterator[Path]:
    """A folder below `root` with second names for all that is in `folders`, as far as it is there. Raises OSError."""
    if not folders:
        yield root
        return
    clear_held(root)
    holding = Path(tempfile.mkdtemp(prefix=_HOLDING, dir=root))
    try:
        with _lock(holding):
            for folder in [*folders] * 2:  # again for what came meanwhile, such as a note that the rest is about to go
                with suppress(OSError):  # what is there already, or gone, costs none of the others
                    shutil.copytree(folder, holding / folder.name, True, copy_function=_link, dirs_exist_ok=True)
            yield holding
    finally:
        shutil.rmtree(holding, ignore_errors=True)


def clear_held(root: Path) -> None:
    for path in root.glob(f"{_HOLDING}*"):
        with suppress(OSError), _lock(path):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:  # No links on this file system, or not to another user's file.
        shutil.copyfile(source, target, follow_symlinks=False)


#: What marks the folder of an experiment: see shared/job_marks.py.
EXPERIMENT = "experiment"

#: The folders that this process has found with their mark.
_MARKED: set[Path] = set()


def expect_mark(job_dir: Path) -> None:
    """From now on this process makes nothing in the folder while it has no mark: it is away."""
    _MARKED.add(job_dir)


def make_below(folder: Path) -> None:
    """Make a folder in a job folder, or that itself. Raises OSError, also where the job folder is away."""
    for job_dir in _MARKED.intersection((folder, *folder.parents)):
        (job_dir / EXPERIMENT).lstat()
    folder.mkdir(parents=True, exist_ok=True)
