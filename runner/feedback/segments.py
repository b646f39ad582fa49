"""A file of feedback that waits to be sent: lines with a checksum, appended and synced, and how far they were sent.

A line is the CRC32 of its JSON, a space, and the JSON: a list of entries. `<file>.sent` has the offset of the first
line that was not sent yet. It is not synced: what is sent again is known to the service by its key.

The process that writes a file holds its lock. Whoever gets the lock of one later sends what was left in it.
"""

import errno
import json
import logging
import os
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tuneloop.runner.feedback.verbs import Entry

SUFFIX = ".outbox"

_CURSOR_DIGITS = 20
_CRC_DIGITS = 8

log = logging.getLogger(__name__)


def lock(descriptor: int) -> bool:
    """Whether the file is ours now. It is until the descriptor is closed, or we end."""
    import fcntl  # not there on Windows, where the rest of this package works

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Written:
    """A line that was written: where it ends, and how often lines had been taken back before."""

    end: int
    takings_back: int


class Segment:
    """One file, open and locked. `end` is where its lines end, `sent` where those begin that were not sent."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._cursor = os.open(f"{path}.sent", os.O_RDWR | os.O_CREAT, 0o600)
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self._closed = False
        self.end = self._synced = os.fstat(descriptor).st_size
        self._unsynced = self._takings_back = 0
        self._last_errno = errno.EIO
        try:
            self.sent = self._read_cursor()
            self.waiting = sum(len(entries) for entries, _ in self.read(self.sent))
        except BaseException:
            os.close(self._cursor)
            raise

    @classmethod
    def create(cls, folder: Path) -> "Segment":
        """A new file. Those of a folder are sent in the order of their names."""
        path = folder / f"{time.time_ns():020d}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        created = cls._lock(path, descriptor)
        if created is None:
            return cls.create(folder)  # somebody was quicker to adopt it, and may have removed it as done
        try:
            sync_folder(folder)
        except OSError:
            created.close(remove=True)
            raise
        return created

    @classmethod
    def adopt(cls, path: Path) -> "Segment | None":
        """A file whose process has ended; None: it has not."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return None
        return cls._lock(path, descriptor)

    @classmethod
    def _lock(cls, path: Path, descriptor: int) -> "Segment | None":
        try:
            # Of one that was sent and removed before we had its lock nothing may be sent once more, or written there.
            locked = cls(path, descriptor) if lock(descriptor) and path.exists() else None
        except BaseException:
            os.close(descriptor)
            raise
        if locked is None:
            os.close(descriptor)
        return locked

    @property
    def unsent_bytes(self) -> int:
        """The size of what waits."""
        return self.end - self.sent

    @property
    def is_done(self) -> bool:
        """Whether nothing waits to be sent, nor to be brought to disk."""
        return not self.waiting and not self._unsynced

    def write(self, entries: Sequence[Entry]) -> Written:
        """Append a line. It is read, and sent, once it is on disk. Raises OSError, and has written nothing then."""
        payload = json.dumps(entries, allow_nan=False).encode()
        with self._writing:
            self._write(b"%08x %s\n" % (zlib.crc32(payload), payload))
            self._unsynced += len(entries)
            return Written(self.end, self._takings_back)

    def sync(self, written: Written) -> None:
        """Return when a line is on disk; one sync serves all who wait for it.

        Raises OSError if it cannot be brought there: then it is not in the file any more.
        """
        with self._syncing:
            if written.takings_back != self._takings_back:
                raise OSError(self._last_errno, "the disk refused what was written before, and this with it")
            if self._synced < written.end:
                self._sync_all()

    def _sync_all(self) -> None:
        with self._writing:
            end, entries = self.end, self._unsynced
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._last_errno = error.errno or errno.EIO
            with self._writing:  # what was written since is taken back too: its writer waits for the next sync
                os.ftruncate(self._descriptor, self._synced)
                self.end, self._unsynced = self._synced, 0
                self._takings_back += 1
            raise
        with self._writing:
            self._synced = end
            self._unsynced -= entries
            self.waiting += entries

    def read(self, offset: int) -> Iterator[tuple[list[Entry], int]]:
        """The lines from an offset on, and where each ends. What is damaged is skipped, and logged."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            while offset < self._synced and (line := file.readline()).endswith(b"\n"):
                offset += len(line)
                yield self._entries(line, offset), offset

    def advance(self, offset: int, entries: int) -> None:
        """Note that so many more entries were sent, up to an offset."""
        os.pwrite(self._cursor, b"%0*d\n" % (_CURSOR_DIGITS, offset), 0)
        with self._writing:
            self.sent = offset
            self.waiting -= entries

    def close(self, *, remove: bool = False) -> None:
        """Leave it to others, or remove it: then all of it was sent."""
        with self._syncing, suppress(OSError):  # which whoever wrote it hears of
            if self._unsynced:
                self._sync_all()
        if remove:
            self.path.unlink(missing_ok=True)
            Path(f"{self.path}.sent").unlink(missing_ok=True)
        with self._syncing:
            self._closed = True
            os.close(self._descriptor)
            os.close(self._cursor)

    def abandon(self) -> None:
        """In a forked child: close the parent's file, whatever the parent's threads were about to do with it."""
        os.close(self._descriptor)
        os.close(self._cursor)

    def _write(self, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left:  # a disk that fills up takes a part first, and says why it takes no more when it is asked again
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, self.end)
            raise
        self.end += len(line)

    def _entries(self, line: bytes, end: int) -> list[Entry]:
        crc, payload = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 : -1]
        if crc != b"%08x" % zlib.crc32(payload):
            log.error("feedback is lost: the line of %s that ends at byte %d is damaged", self.path, end)
            return []
        found: list[Entry] = json.loads(payload)
        return found

    def _read_cursor(self) -> int:
        said = os.pread(self._cursor, _CURSOR_DIGITS, 0)
        offset = int(said) if len(said) == _CURSOR_DIGITS and said.isdigit() else 0
        # A power failure may leave anything there.
        if 0 < offset <= self.end and os.pread(self._descriptor, 1, offset - 1) == b"\n":
            return offset
        return 0


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
