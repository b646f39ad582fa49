"""The outbox: append-only files that hold records on disk until somebody has taken them.

A file belongs to one process, which holds its lock for life; nobody appends to a file that another process began. A
record is its length, its number in the file, a checksum, and the payload. The checksum begins with the file's random
name, so that no text inside a payload can pass for a record. A damaged record costs itself alone: a reader looks for
the next whole one.
"""

import errno
import os
import struct
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".records"

#: What a file is called once it was taken and had damage in it: it stays, to be looked at.
DAMAGED_SUFFIX = ".damaged"

_MARK = b"\xf5\xc1TL"  # no UTF-8 text has its first two bytes

#: The mark, the length of the payload in bytes, the number of the record, and the checksum of both and of the payload.
_HEAD = struct.Struct("<4sIQI")
_COUNTED = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Record:
    """A payload, its number in its file, from 1 on, and the offset of what follows it."""

    payload: bytes
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class Damage:
    """So many bytes before the offset `end` are no record."""

    size: int
    end: int


class OutboxFile:
    """A file whose lock this process holds. `end` is where its records end, `taken` up to where somebody took them."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._seed = zlib.crc32(path.stem.encode())
        self.end = os.fstat(descriptor).st_size
        self.taken = self._number = 0
        self.is_damaged = False

    @classmethod
    def create(cls, folder: Path) -> "OutboxFile":
        """A new file. The names of a folder's files sort by the time of their creation. Raises OSError."""
        path = folder / f"{time.time_ns():020d}-{uuid.uuid4().hex}{SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            if lock(descriptor) and path.exists():
                sync_folder(folder)
                return cls(path, descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)
        return cls.create(folder)  # another process was quicker to claim it, and may have removed it as empty

    @classmethod
    def claim(cls, path: Path) -> "OutboxFile | None":
        """A file that another process left. None: that process still lives, or the file is gone. Raises OSError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if lock(descriptor) and path.exists():
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def append(self, payloads: Sequence[bytes]) -> None:
        """Bring payloads to disk. Raises OSError: then the file takes no more, and none of them was appended."""
        data, number = bytearray(), self._number
        for payload in payloads:
            number += 1
            data += _HEAD.pack(_MARK, len(payload), number, self._checksum(len(payload), number, payload)) + payload
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
            if not os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                raise OSError(errno.ESTALE, f"{self.path} was replaced")
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.end)
            raise
        self.end, self._number = self.end + len(data), number

    def read(self, offset: int) -> Iterator[Record | Damage]:
        """What lies between an offset and the end of the file. Raises OSError."""
        data = os.pread(self._descriptor, self.end - offset, offset)
        place = 0
        while place < len(data):
            found = place
            while (record := self._record_at(data, found, offset)) is None and found >= 0:
                found = data.find(_MARK, found + 1)
            if record is None:
                yield Damage(len(data) - place, offset + len(data))
                return
            if found > place:
                yield Damage(found - place, offset + found)
            yield record
            place = record.end - offset

    def remove(self) -> None:
        """Delete the file, all of which was taken; where it is damaged, keep it under another name."""
        if self.is_damaged:
            self.path.replace(self.path.with_suffix(DAMAGED_SUFFIX))
        else:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leave the file to whoever claims it next."""
        os.close(self._descriptor)

    def _record_at(self, data: bytes, place: int, offset: int) -> Record | None:
        if place < 0 or data[place : place + len(_MARK)] != _MARK or len(data) - place < _HEAD.size:
            return None
        _, length, number, checksum = _HEAD.unpack_from(data, place)
        start = place + _HEAD.size
        payload = data[start : start + length]
        if len(payload) < length or self._checksum(length, number, payload) != checksum:
            return None
        return Record(payload, number, offset + start + length)

    def _checksum(self, length: int, number: int, payload: bytes) -> int:
        return zlib.crc32(payload, zlib.crc32(_COUNTED.pack(length, number), self._seed))


class _Append:
    def __init__(self, payloads: Sequence[bytes]) -> None:
        self.payloads = payloads
        self.is_done = False
        self.error: OSError | None = None


class Outbox:
    """The files that this process writes in a folder, oldest first; the last one is appended to.

    Threads may append at once: one fsync serves all who wait for it. A file of `file_bytes`, and one that the disk
    refused, is followed by a new one.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        """Raises OSError where the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._file_bytes = folder.resolve(), file_bytes
        sync_folder(self.folder.parent)
        self.files: list[OutboxFile] = []
        self._open: OutboxFile | None = None
        self._waiting: deque[_Append] = deque()
        self._writing = threading.Lock()

    def append(self, payloads: Sequence[bytes]) -> None:
        """Return when all payloads are on disk. Raises OSError: then none of them is in the outbox."""
        own = _Append(payloads)
        self._waiting.append(own)
        with self._writing:
            if not own.is_done:  # nobody before us took it along
                self._append([self._waiting.popleft() for _ in range(len(self._waiting))])
        if own.error is not None:
            raise OSError(own.error.errno, own.error.strerror) from own.error

    def begin_new_file(self) -> None:
        """Append no more to the open file, so that it can be removed."""
        with self._writing:
            self._open = None

    def remove(self, file: OutboxFile) -> bool:
        """Remove a file that was taken whole; False: it is still appended to."""
        with self._writing:
            if file is self._open:
                return False
            self.files.remove(file)
        file.remove()
        return True

    def close(self) -> None:
        """Wait for those who append, and leave what was not taken to the next process."""
        with self._writing:
            for file in self.files:
                if file.taken == file.end:
                    file.remove()
                else:
                    file.close()
            self.files, self._open = [], None

    def _append(self, group: Sequence[_Append]) -> None:
        error: OSError | None = None
        try:
            if self._open is None or self._open.end >= self._file_bytes:
                self._open = None
                self._open = OutboxFile.create(self.folder)
                self.files.append(self._open)
            self._open.append([payload for each in group for payload in each.payloads])
        except OSError as refused:
            error, self._open = refused, None
        for each in group:
            each.error, each.is_done = error, True


def lock(descriptor: int) -> bool:
    """Whether the file is ours now. It is until the descriptor is closed, or the process ends."""
    import fcntl  # not there on Windows, where the rest of this package works

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
