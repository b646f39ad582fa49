"""The outbox: append-only files that hold records on disk until somebody has taken them.

{folder}/{time}-{owner}-{random}.records    a record: mark, length, number, checksum, payload

A file belongs to one process, which holds its lock for life; nobody appends to a file that another process began. A
record's number counts from 1 in its file. The checksum begins with the file's name, so that no text inside a payload
can pass for a record. A damaged record costs itself alone: a reader looks for the next whole one.
"""

import errno
import os
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".records"

_MARK = b"\xf5\xc1TL"  # no UTF-8 text has its first two bytes

#: The mark, the length of the payload in bytes, the number of the record, and the checksum of both and of the payload.
_HEAD = struct.Struct("<4sIQI")
_COUNTED = struct.Struct("<IQ")

#: How many bytes at once are searched for the next whole record.
_SEARCHED = 1 << 20

#: Files of one folder that a reader has open at once.
_OPEN_FILES = 64


class Place(NamedTuple):
    """Where a record lies: the file's id, and the record's number in it."""

    file: str
    number: int


@dataclass(frozen=True, slots=True)
class Record:
    """A payload, its number in its file, and the offset of what follows it."""

    payload: bytes
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class Damage:
    """`data` is no record; `end` is the offset of what follows it."""

    data: bytes
    end: int


class _Append:
    """What one caller wants on disk. `wake` is set when it is there, or refused, or when the caller is to write."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self.payloads, self.wake = payloads, threading.Event()
        self.is_done = False
        self.last = Place("", 0)
        self.error: OSError | None = None


class _OpenFile:
    """The file that an outbox appends to."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Raises OSError. The names of a folder's files sort by the time of their creation."""
        while True:
            self.path = folder / f"{time.time_ns():020d}-{owner}-{uuid.uuid4().hex[:16]}{SUFFIX}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
            try:
                if lock(self._descriptor) and self.path.exists():
                    sync_folder(folder)
                    break
            except OSError:
                self.path.unlink(missing_ok=True)
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # another process was quicker to claim it, and may have removed it as empty
        self.id, self.began = self.path.stem, time.monotonic()
        self._seed = zlib.crc32(self.id.encode())
        self.end = self.number = 0

    def append(self, payloads: Sequence[bytes]) -> None:
        """Bring payloads to disk. Raises OSError: then the file takes no more, and none of them was appended."""
        data, number = bytearray(), self.number
        for payload in payloads:
            number += 1
            data += _HEAD.pack(_MARK, len(payload), number, _checksum(self._seed, number, payload)) + payload
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
        self.end, self.number = self.end + len(data), number

    def close(self) -> None:
        os.close(self._descriptor)


class Outbox:
    """Appends to files of its own in a folder, one after the other: each takes up to `file_bytes`.

    Threads may append at once: one fsync serves all who wait for it. After an error of the disk a new file is begun.
    The files' names hold the `owner`, by which readers know them.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        """Raises OSError where the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._file_bytes = folder.resolve(), file_bytes
        sync_folder(self.folder.parent)
        self.owner = uuid.uuid4().hex[:8]
        #: Bytes that were appended, in all files.
        self.written = 0
        self._open: _OpenFile | None = None
        self._waiting: list[_Append] = []
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._is_led = False

    def append(self, payloads: Sequence[bytes]) -> Place:
        """Return when all payloads are on disk, with the place of the last one.

        Raises OSError: then none of them is in the outbox.
        """
        own = _Append(payloads)
        with self._lock:
            self._waiting.append(own)
            leads, self._is_led = not self._is_led, True
        if not leads:
            own.wake.wait()
        if not own.is_done:  # it is our turn to write, for all who wait by now
            with self._lock:
                group, self._waiting = self._waiting, []
            with self._writing:
                self._append(group)
            with self._lock:
                self._is_led = bool(self._waiting)
                if self._waiting:
                    self._waiting[0].wake.set()
            for each in group:
                each.wake.set()
        if own.error is not None:
            raise OSError(own.error.errno, own.error.strerror) from own.error
        return own.last

    def begin_new_file(self, *, after_s: float = 0.0) -> None:
        """Let the open file go to its readers, if it was begun so many seconds ago."""
        with self._writing:
            if self._open is not None and time.monotonic() - self._open.began >= after_s:
                self._close_file()

    def close(self) -> None:
        """Wait for those who append, and let the open file go."""
        self.begin_new_file()

    def _append(self, group: Sequence[_Append]) -> None:
        payloads, error, file = [payload for each in group for payload in each.payloads], None, ""
        try:
            file, number = self._put(payloads)
        except OSError as refused:
            error, number = refused, 0
            self._close_file()
        number -= len(payloads)
        for each in group:
            number += len(each.payloads)
            each.last, each.error, each.is_done = Place(file, number), error, True

    def _put(self, payloads: Sequence[bytes]) -> Place:
        if self._open is not None and self._open.end >= self._file_bytes:
            self._close_file()
        if self._open is None:
            self._open = _OpenFile(self.folder, self.owner)
        before = self._open.end
        self._open.append(payloads)
        self.written += self._open.end - before
        return Place(self._open.id, self._open.number)

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class OutboxReader:
    """Reads a file to which its owner may append meanwhile. `taken` is the offset up to which somebody has it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file may be gone."""
        self.path, self.id = path, path.stem
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._seed = zlib.crc32(self.id.encode())
        self.taken = 0
        self.is_claimed = False
        self._seen, self._last = 0, 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def claim(self) -> bool:
        """Whether the file is ours: its owner has let it go, or died, and nobody else has claimed it."""
        self.is_claimed = self.is_claimed or lock(self._descriptor)
        return self.is_claimed

    def read(self, offset: int, end: int | None = None) -> Iterator[Record | Damage]:
        """What lies between two offsets, or to the end of the file but for what its owner is just writing.

        Raises OSError.
        """
        end = self.size if end is None else end
        while offset < end:
            record = self._record_at(offset, end)
            if record is None:
                found = self._next_record(offset + 1, end)
                if found == end and not self.is_claimed:
                    return
                yield Damage(os.pread(self._descriptor, found - offset, offset), found)
                offset = found
            else:
                yield record
                offset = record.end

    def last_number(self) -> int:
        """The number of the last record. Reads what was not read for this before. Raises OSError."""
        for found in self.read(self._seen):
            self._seen, self._last = found.end, found.number if isinstance(found, Record) else self._last
        return self._last

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leave the file to whoever claims it next."""
        os.close(self._descriptor)

    def _record_at(self, offset: int, end: int) -> Record | None:
        head = os.pread(self._descriptor, _HEAD.size, offset)
        if len(head) < _HEAD.size or not head.startswith(_MARK):
            return None
        _, length, number, checksum = _HEAD.unpack(head)
        if (after := offset + _HEAD.size + length) > end:
            return None
        payload = os.pread(self._descriptor, length, offset + _HEAD.size)
        if len(payload) < length or _checksum(self._seed, number, payload) != checksum:
            return None
        return Record(payload, number, after)

    def _next_record(self, offset: int, end: int) -> int:
        """The offset of the next whole record, or the end."""
        while offset < end:
            data = os.pread(self._descriptor, _SEARCHED + len(_MARK), offset)
            found = data.find(_MARK)
            if found < 0:
                offset += _SEARCHED
            elif self._record_at(offset + found, end) is not None:
                return offset + found
            else:
                offset += found + 1
        return end


class OutboxReaders:
    """The files of a folder that are ours to read, oldest first: those of the `owners`, and those that others left.

    At most 64 of them are open at once.
    """

    def __init__(self, folder: Path, owners: Container[str]) -> None:
        self.folder, self._owners = folder, owners
        self._open: dict[str, OutboxReader] = {}

    @property
    def files(self) -> list[OutboxReader]:
        """Those that are open."""
        return [self._open[id_] for id_ in sorted(self._open)]

    def look(self, *, but: Container[str] = ()) -> list[OutboxReader]:
        """The files as they are now, without those of these ids. Raises OSError."""
        for name in names_in(self.folder):
            if len(self._open) >= _OPEN_FILES:
                break
            if (id_ := name.removesuffix(SUFFIX)) in self._open or id_ in but:
                continue
            with suppress(FileNotFoundError):  # its process has removed it
                reader = OutboxReader(self.folder / name)
                if reader.claim() or owner_of(id_) in self._owners:
                    self._open[id_] = reader
                else:
                    reader.close()
        for reader in self._open.values():
            reader.claim()
        return self.files

    def close(self, reader: OutboxReader) -> None:
        """Look at a file no more, unless somebody looks for it anew."""
        del self._open[reader.id]
        reader.close()

    def close_all(self) -> None:
        """Leave what was not taken to the next process."""
        for reader in list(self._open.values()):
            self.close(reader)


def owner_of(file: str) -> str:
    """The owner in a file's id."""
    return file.partition("-")[2].partition("-")[0]


def names_in(folder: Path) -> list[str]:
    """The names of the files of records in a folder, oldest first. Raises OSError."""
    return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))


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


def _checksum(seed: int, number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COUNTED.pack(len(payload), number), seed))
