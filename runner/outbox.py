"""The outbox: append-only files that hold records on disk until a drain has read them.

{folder}/{time}-{owner}-{random}.records    a record: mark, length, number, checksum, payload

A file belongs to one process, which holds its lock for life; no process appends to a file that another process began. A
record's number counts from 1 in its file. The checksum begins with the file's name, so that no text inside a payload
can pass for a record. A damaged record costs itself alone: a reader looks for the next whole one.
"""

import errno
import os
import re
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tuneloop.runner.private_files import is_named, sync_folder

SUFFIX = ".records"

#: The time in nanoseconds, the owner, and what makes the name unique.
_NAME = re.compile(rf"[0-9]{{20}}-[0-9a-f]{{8}}-[0-9a-f]{{16}}{re.escape(SUFFIX)}")

_MARK = b"\xf5\xc1TL"  # no UTF-8 text has its first two bytes

#: The mark, the length of the payload in bytes, the number of the record, and the checksum of both and of the payload.
_HEAD = struct.Struct("<4sIQI")
_COUNTED = struct.Struct("<IQ")

#: How many bytes at once are searched for the next whole record.
_SEARCHED = 1 << 20


class Place(NamedTuple):
    """Where a record lies."""

    file: str
    number: int


class Record(NamedTuple):
    """A payload, its number in its file, and the offset of its end."""

    payload: bytes
    number: int
    end: int


class Damage(NamedTuple):
    """Bytes that are no record, and the offset of their end."""

    data: bytes
    end: int


class _OpenFile:
    """The file that an outbox appends to."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Raises OSError. The names of a folder's files sort by the time of their creation."""
        is_ours, flags = False, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        while not is_ours:  # a reader may be quicker to claim it, and remove it as empty
            self.path = folder / f"{time.time_ns():020d}-{owner}-{uuid.uuid4().hex[:16]}{SUFFIX}"
            self._descriptor = os.open(self.path, flags, 0o600)
            try:
                is_ours = lock(self._descriptor) and is_named(self._descriptor, self.path)
                sync_folder(folder)
            except OSError:
                self.path.unlink(missing_ok=True)
                is_ours = False
                raise
            finally:
                if not is_ours:
                    self.close()
        self.id, self.began = self.path.stem, time.monotonic()
        self.end = self.number = 0
        self._seed = zlib.crc32(self.id.encode())

    def append(self, payloads: Sequence[bytes]) -> int | None:
        """Bring payloads to disk, so many bytes. Raises OSError: then the file takes no more, and has none of them.

        None: nor has it, since it was deleted, moved or changed.
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
                there, own = os.lstat(self.path), os.fstat(self._descriptor)
                if os.path.samestat(there, own) and own.st_size == self.end + written:
                    self.end, self.number, size = own.st_size, number, written
        finally:
            if size is None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                    if not self.end:
                        self.path.unlink()
        return size

    def close(self) -> None:
        os.close(self._descriptor)


class Outbox:
    """Appends to files of its own in a folder, one after the other: each holds up to `file_bytes`.

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
        self._waiting: list[tuple[Sequence[bytes], Future[Place]]] = []
        self._changed = threading.Condition()
        self._is_writing = False

    def append(self, payloads: Sequence[bytes]) -> Place:
        """Return when all payloads are on disk, with the last one's place. Raises OSError: then none of them stays."""
        done, group = Future[Place](), list[tuple[Sequence[bytes], Future[Place]]]()
        with self._changed:
            self._waiting.append((payloads, done))
            self._changed.wait_for(lambda: done.done() or not self._is_writing)
            if not done.done():  # it is our turn to write, for all who wait by now
                group, self._waiting, self._is_writing = self._waiting, group, True
        if group:
            try:
                self._write(group)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
        return done.result()

    def begin_new_file(self, *, after_s: float = 0.0) -> None:
        """Let the open file go to its readers, if it was begun so many seconds ago."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing)
            if self._open is not None and time.monotonic() - self._open.began >= after_s:
                self.forget_file()

    #: Wait for the writer, and close the open file.
    close = begin_new_file

    def forget_file(self) -> None:
        """Close the open file, without waiting for a writer: in a forked child, the file is the parent's."""
        file, self._open = self._open, None
        if file is not None:
            file.close()

    def _write(self, group: Sequence[tuple[Sequence[bytes], Future[Place]]]) -> None:
        payloads = [payload for each, _ in group for payload in each]
        try:
            if self._open is not None and self._open.end >= self._file_bytes:
                self.forget_file()
            for _ in range(2):
                file = self._open = self._open or _OpenFile(self.folder, self.owner)
                if (size := file.append(payloads)) is not None:
                    break
                self.forget_file()
            else:
                raise OSError(errno.ESTALE, f"another process deletes what is written in {self.folder}")
        except BaseException as error:  # whatever was raised, all are answered
            self.forget_file()
            for _, done in group:
                number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
                done.set_exception(OSError(number or errno.EIO, reason or "the thread that wrote this failed"))
            if not isinstance(error, OSError):
                raise
        else:
            self.written += size
            number = file.number - len(payloads)
            for each, done in group:
                number += len(each)
                done.set_result(Place(file.id, number))


class OutboxReader:
    """Reads a file to which its owner may append meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file may be gone."""
        self.path, self.id, self.owner = path, path.stem, owner_of(path.stem)
        # NFS locks no file that is open to read alone; a read-only disk lets no process open one otherwise.
        access = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        self._descriptor = os.open(path, access | os.O_NOFOLLOW)
        self._seed = zlib.crc32(self.id.encode())
        self.is_claimed = False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def claim(self) -> bool:
        """Whether the file is ours: its owner has let it go, or died, and no other process has claimed it."""
        self.is_claimed = self.is_claimed or lock(self._descriptor)
        return self.is_claimed

    @property
    def is_there(self) -> bool:
        """Whether the file was neither removed nor replaced."""
        return is_named(self._descriptor, self.path)

    def read(self, offset: int, end: int | None = None) -> Iterator[Record | Damage]:
        """What lies between two offsets, or to the end of the file but for what its owner is just writing.

        Raises OSError.
        """
        is_claimed, size = self.is_claimed, self.size  # in this order: until it is claimed, its owner may append
        end = size if end is None else end
        is_whole = is_claimed and end == size
        while offset < end:
            if (record := self._record_at(offset, end)) is not None:
                yield record
                offset = record.end
                continue
            found = self._next_record(offset + 1, end)
            if found == end and not is_whole:
                return
            yield Damage(os.pread(self._descriptor, found - offset, offset), found)
            offset = found

    def close(self) -> None:
        """Leave the file to the process that claims it next."""
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


def owner_of(file: str) -> str:
    """The owner of the file of this id."""
    return file[21:29]


def names_in(folder: Path) -> list[str]:
    """The names of the files of records in a folder, oldest first; not what no outbox made. Raises OSError."""
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)))


def _checksum(seed: int, number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COUNTED.pack(len(payload), number), seed))


def lock(descriptor: int) -> bool:
    """Whether the file is ours now. It is until the descriptor is closed, or the process ends."""
    import fcntl  # not there on Windows, where the rest of this package works

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
