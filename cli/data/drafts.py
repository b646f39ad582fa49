"""Files that take another's place when they are whole: written beside it, readable by their owner alone.

{folder}/.{name}.{8 digits}.partial    locked for as long as its process lives: what nobody holds, a killed one left
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tuneloop.shared.held_files import new_unlinked


class DraftFile:
    """A file to write into, which `publish` gives the name that it is for."""

    def __init__(self, path: Path) -> None:
        """Also deletes what is left of earlier ones. Raises OSError."""
        list(clear_left_drafts(path))
        self._path, self._draft = path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self.file = new_unlinked(self._draft)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        """Bring it to disk and to its place. Raises OSError."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self._draft.replace(self._path)

    def discard(self) -> None:
        """Close it, and delete it if it was not published."""
        try:
            self.file.close()
        finally:
            self._draft.unlink(missing_ok=True)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Until its end nobody else who is `in_turn` puts another file in the place of this one.

    It is the file itself that is locked. Where there is none, or the file system has no locks, nobody waits.
    """
    with ExitStack() as held:
        with suppress(OSError):
            while not _lock_file(path, held):
                held.close()
        yield


def _lock_file(path: Path, held: ExitStack) -> bool:
    """Whether the file that is locked now is still the one at its path: who had it before may have replaced it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.path.samestat(os.fstat(descriptor), path.stat())


def clear_left_drafts(path: Path) -> Iterator[str]:
    """Delete the drafts for this path that nobody writes any more; what could not be deleted, and why."""
    named = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.partial").fullmatch
    for draft in sorted(each for each in path.parent.glob(".*.partial") if named(each.name) and not each.is_symlink()):
        try:
            descriptor = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink(missing_ok=True)
            except BlockingIOError:
                pass  # an export, which begins anew when somebody was erased meanwhile
            finally:
                os.close(descriptor)
        except OSError as error:
            yield f"its draft {draft.name} cannot be deleted: {error.strerror or error}"
