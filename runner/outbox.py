"""The outbox: append-only files that hold records on disk until somebody has taken them.

{folder}/{time}-{owner}-{random}.records    a record: mark, length, number, checksum, payload

A file belongs to one process, which holds its lock for life; nobody appends to a file that another process began. A
record's number counts from 1 in its file. The checksum begins with the file's name, so that no text inside a payload
can pass for a record. A damaged record costs itself alone: a reader looks for the next whole one.
"""

import errno
import logging
import os
import re
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".records"

#: The time in nanoseconds, the owner, and what makes the name unique.
_NAME = re.compile(rf"[0-9]{{20}}-([0-9a-f]{{8}})-[0-9a-f]{{16}}{re.escape(SUFFIX)}")

_MARK = b"\xf5\xc1TL"  # no UTF-8 text has its first two bytes

#: The mark, the length of the payload in bytes, the number of the record, and the checksum of both and of the payload.
_HEAD = struct.Struct("<4sIQI")
_COUNTED = struct.Struct("<IQ")

#: How many bytes at once are searched for the next whole record.
_SEARCHED = 1 << 20

#: Files that others left in a folder, and that a reader has open at once.
_OPEN_FILES = 64

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a record lies: the file's id, and the record's number in it."""

    file: str
    number: int


class Record(NamedTuple):
    """A payload, its number in its file, and the offset of what follows it."""

    payload: bytes
    number: int
    end: int


class Damage(NamedTuple):
    """`data` is no record; `end` is the offset of what follows it."""

    data: bytes
    end: int


class _Append:
    """What one caller wants on disk. `wake` is set when it is there, or refused, or when the caller is to write."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self.payloads, self.wake = payloads, threading.Event()
        self.is_done = False
        self.last = Place("", 0)
        self.error: OSError | None = OSError(errno.EIO, "the thread that wrote this failed")


class _OpenFile:
    """The file that an outbox appends to."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Raises OSError. The names of a folder's files sort by the time of their creation."""
        while True:
            self.path = folder / f"{time.time_ns():020d}-{owner}-{uuid.uuid4().hex[:16]}{SUFFIX}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
            try:
                if lock(self._descriptor):
                    sync_folder(folder)
                    break
            except OSError:
                self.path.unlink(missing_ok=True)
                self.close()
                raise
            self.close()  # another process was quicker to claim it, and removes it as empty
        self.id, self.began = self.path.stem, time.monotonic()
        self.end = self.number = 0
        self._status = os.fstat(self._descriptor)
        self._seed = zlib.crc32(self.id.encode())

    def append(self, payloads: Sequence[bytes]) -> int | None:
        """Bring payloads to disk, so many bytes. Raises OSError: then the file takes no more, and has none of them.

        None: nor has it, since somebody deleted, moved or changed it.
        """
        data, number, written, size = bytearray(), self.number, 0, None
        for payload in payloads:
            number += 1
            data += _HEAD.pack(_MARK, len(payload), number, _checksum(self._seed, number, payload)) + payload
        try:
            with memoryview(data) as view:
                while written < len(view):
                    written += os.write(self._descriptor, view[written:])
            os.fsync(self._descriptor)
            with suppress(FileNotFoundError):
                found = os.lstat(self.path)
                if os.path.samestat(found, self._status) and found.st_size == self.end + written:
                    size = written
        finally:
            if size is None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                    if not self.end:
                        self.path.unlink()
        if size is not None:
            self.end, self.number = self.end + size, number
        return size

    def close(self) -> None:
        os.close(self._descriptor)


class Outbox:
    """Appends to files of its own in a folder, one after the other: each takes up to `file_bytes`.

    Threads may append at once: one fsync serves all who wait for it. After an error of the disk a new file is begun.
    The files' names hold the `owner`, by which readers know them.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        """Raises OSError where the folder cannot be made."""
        made = [each for each in folder.parents if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._file_bytes = folder.resolve(), file_bytes
        for each in (self.folder, *made):
            sync_folder(each.parent)
        self.owner = uuid.uuid4().hex[:8]
        #: Bytes that were appended, in all files.
        self.written = 0
        self._open: _OpenFile | None = None
        self._waiting: list[_Append] = []
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._is_led = False

    def append(self, payloads: Sequence[bytes]) -> Place:
        """Return when all payloads are on disk, with the place of the last one.

        Raises OSError: then none of them stays in the outbox. A reader may have read them before they were refused.
        """
        own, group = _Append(payloads), list[_Append]()
        with self._lock:
            self._waiting.append(own)
            if not self._is_led:
                self._is_led = True
                own.wake.set()
        try:
            own.wake.wait()
            if not own.is_done:  # it is our turn to write, for all who wait by now
                with self._writing:
                    with self._lock:
                        group, self._waiting = self._waiting, group
                    self._write(group)
        finally:  # whatever was raised here, the group is answered, and the next one is written
            with self._lock:
                if not own.is_done:
                    self._waiting = [each for each in self._waiting if each is not own]
                    if own.wake.is_set():
                        self._is_led = bool(self._waiting)
                        for each in self._waiting[:1]:
                            each.wake.set()
                for each in group:
                    each.is_done = True
                    each.wake.set()
        if own.error is not None:
            raise OSError(own.error.errno, own.error.strerror) from own.error
        return own.last

    def begin_new_file(self, *, after_s: float = 0.0) -> None:
        """Let the open file go to its readers, if it was begun so many seconds ago."""
        with self._writing:
            if self._open is not None and time.monotonic() - self._open.began >= after_s:
                self.forget_file()

    def close(self) -> None:
        """Wait for whoever writes, and let the open file go."""
        self.begin_new_file()

    def forget_file(self) -> None:
        """Close the open file, without waiting for whoever writes: in a forked child, the file is the parent's."""
        file, self._open = self._open, None
        if file is not None:
            file.close()

    def _write(self, group: Sequence[_Append]) -> None:
        payloads = [payload for each in group for payload in each.payloads]
        try:
            if self._open is not None and self._open.end >= self._file_bytes:
                self.forget_file()
            for _ in range(2):
                file = self._open = self._open or _OpenFile(self.folder, self.owner)
                if (size := file.append(payloads)) is not None:
                    break
                self.forget_file()
            else:
                raise OSError(errno.ESTALE, f"somebody deletes what is written in {self.folder}")
        except BaseException as error:
            self.forget_file()
            if not isinstance(error, OSError):
                raise
            for each in group:
                each.error = error
        else:
            self.written += size
            number = file.number - len(payloads)
            for each in group:
                number += len(each.payloads)
                each.last, each.error = Place(file.id, number), None


class OutboxReader:
    """Reads a file to which its owner may append meanwhile. `taken` is the offset up to which somebody has it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file may be gone, or nothing that an outbox made."""
        if (name := _NAME.fullmatch(path.name)) is None:
            raise OSError(errno.EINVAL, "no outbox gives such a name", str(path))
        self.path, self.id, self.owner = path, path.stem, name[1]
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # NFS locks no file that is open to read alone
        self._seed = zlib.crc32(self.id.encode())
        self.taken = 0
        self.is_claimed = False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def claim(self) -> bool:
        """Whether the file is ours: its owner has let it go, or died, and nobody else has claimed it.

        Raises FileNotFoundError if somebody removed or replaced it.
        """
        self.is_claimed = self.is_claimed or lock(self._descriptor)
        if self.is_claimed and not os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor)):
            raise FileNotFoundError(errno.ENOENT, "another file has its name", str(self.path))
        return self.is_claimed

    def read(self, offset: int) -> Iterator[Record | Damage]:
        """What lies between an offset and the end of the file, but for what its owner is just writing.

        Raises OSError.
        """
        is_whole, end = self.is_claimed, self.size  # in this order: until it is claimed, its owner may append
        while offset < end:
            record = self._record_at(offset, end)
            if record is None:
                found = self._next_record(offset + 1, end)
                if found == end and not is_whole:
                    return
                yield Damage(os.pread(self._descriptor, found - offset, offset), found)
                offset = found
            else:
                yield record
                offset = record.end

    def remove(self) -> None:
        """Delete the file, which is claimed. Raises OSError."""
        with suppress(FileNotFoundError):
            if self.claim():
                self.path.unlink()

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
            data = os.pread(self._descriptor, _SEARCHED + len(_MARK) - 1, offset)
            found = data.find(_MARK)
            while found >= 0:
                if self._record_at(offset + found, end) is not None:
                    return offset + found
                found = data.find(_MARK, found + 1)
            offset += _SEARCHED
        return end


class OutboxReaders:
    """The files of a folder that are ours to read, oldest first: those of the `owners`, and those that others left.

    At most 64 of the latter are open at once.
    """

    def __init__(self, folder: Path, owners: Container[str]) -> None:
        self.folder, self._owners = folder.resolve(), owners
        self._open: dict[str, OutboxReader] = {}
        self._unreadable: set[str] = set()

    def look(self, *, but: Container[str] = ()) -> list[OutboxReader]:
        """The files as they are now, without those of these ids. Raises OSError if the folder cannot be read.

        A file that cannot be opened is logged. One that somebody replaced is read from its beginning.
        """
        for reader in [*self._open.values()]:
            self._keep_if_ours(reader)
        for name in names_in(self.folder):
            id_ = name.removesuffix(SUFFIX)
            is_left = len(self._open) >= _OPEN_FILES and name[21:29] not in self._owners
            if is_left or id_ in self._open or id_ in but:
                continue
            try:
                self._keep_if_ours(OutboxReader(self.folder / name))
            except FileNotFoundError:
                continue  # its process has removed it
            except OSError as error:
                if name not in self._unreadable:
                    self._unreadable.add(name)
                    log.error("a file of the outbox cannot be read: %s", error)
        return [self._open[id_] for id_ in sorted(self._open)]

    def _keep_if_ours(self, reader: OutboxReader) -> None:
        with suppress(OSError):
            if reader.claim() or reader.owner in self._owners:
                self._open[reader.id] = reader
                return
        self._open.pop(reader.id, None)
        reader.close()

    def close(self, reader: OutboxReader) -> None:
        """Look at a file no more, unless somebody looks for it anew."""
        del self._open[reader.id]
        reader.close()

    def close_all(self) -> None:
        """Leave what was not taken to the next process."""
        for reader in list(self._open.values()):
            self.close(reader)


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
