"""Keeps records on disk, in append-only files, until a drain has read them.

{folder}/{time}-{owner}-{random}.records    a record: mark, length, number, checksum, payload

Each file belongs to one process, which locks it and alone appends to it. Numbers count from 1 in a file. The checksum
covers the file's name, so no payload can pass for a record. After a damaged record a reader finds the next valid one.
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

#: Time in nanoseconds, owner, and a random part.
_NAME = re.compile(rf"[0-9]{{20}}-[0-9a-f]{{8}}-[0-9a-f]{{16}}{re.escape(SUFFIX)}")

_MARK = b"\xf5\xc1TL"  # no UTF-8 text has its first two bytes

#: Mark, payload length in bytes, record number, and the checksum of both and the payload.
_HEAD = struct.Struct("<4sIQI")
_COUNTED = struct.Struct("<IQ")

_SEARCHED = 1 << 20  # bytes searched at once for the next valid record


class Place(NamedTuple):
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
    def __init__(self, folder: Path, owner: str) -> None:
        """Raises OSError. File names sort by creation time."""
        is_ours, flags = False, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        while not is_ours:  # a reader may claim and remove the empty file first
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
        """Sync payloads; the bytes written. None, and for good after an OSError: the file has none of them."""
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
    """Appends to its own files in a folder, up to `file_bytes` each, and starts a new one after a disk error.

    Threads may append at once: one fsync serves all that wait. Readers know the files by the `owner` in their names.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        """Raises OSError."""
        made = [each for each in folder.parents if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._file_bytes = folder.resolve(), file_bytes
        for each in (self.folder, *made):
            sync_folder(each.parent)
        self.owner = uuid.uuid4().hex[:8]
        self.written = 0  # bytes appended to all files
        self._open: _OpenFile | None = None
        self._waiting: list[tuple[Sequence[bytes], Future[Place]]] = []
        self._changed = threading.Condition()
        self._is_writing = False

    def append(self, payloads: Sequence[bytes]) -> Place:
        """Sync all payloads to disk; the last one's place. Raises OSError, and then keeps none."""
        done, group = Future[Place](), list[tuple[Sequence[bytes], Future[Place]]]()
        with self._changed:
            self._waiting.append((payloads, done))
            self._changed.wait_for(lambda: done.done() or not self._is_writing)
            if not done.done():  # this thread writes for all that wait
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
        """Release the open file to readers, if it is at least so many seconds old."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing)
            if self._open is not None and time.monotonic() - self._open.began >= after_s:
                self.forget_file()

    close = begin_new_file  # waits for the writer, then closes the open file

    def forget_file(self) -> None:
        """Close the open file without waiting for a writer: a forked child must not touch its parent's file."""
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
        except BaseException as error:  # each waiting thread needs an answer
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
    """Reads a file while its owner may append."""

    def __init__(self, path: Path) -> None:
        """Raises OSError; the file may be gone."""
        self.path, self.id, self.owner = path, path.stem, owner_of(path.stem)
        # NFS cannot lock a read-only descriptor; a read-only disk allows no other.
        access = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        self._descriptor = os.open(path, access | os.O_NOFOLLOW)
        self._seed = zlib.crc32(self.id.encode())
        self.is_claimed = False

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def claim(self) -> bool:
        """Lock the file; False while its owner or another reader holds it."""
        self.is_claimed = self.is_claimed or lock(self._descriptor)
        return self.is_claimed

    @property
    def is_there(self) -> bool:
        """Whether the file was neither removed nor replaced."""
        return is_named(self._descriptor, self.path)

    def read(self, offset: int, end: int | None = None) -> Iterator[Record | Damage]:
        """Records between two offsets; at the end of an owned file, a partial record is no damage. Raises OSError."""
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
        """Release the file to other readers."""
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
    return file[21:29]


def names_in(folder: Path) -> list[str]:
    """Names of the record files in a folder, oldest first. Raises OSError."""
    return sorted(filter(_NAME.fullmatch, os.listdir(folder)))


def _checksum(seed: int, number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COUNTED.pack(len(payload), number), seed))


def lock(descriptor: int) -> bool:
    """Whether this process now holds the lock, until the descriptor is closed."""
    import fcntl  # missing on Windows, where the rest of this package works

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
