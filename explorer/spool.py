"""The local append-only log that a record must reach before its reply ends: "acknowledged" means on disk here.

    {spool_dir}/{slot}/00000001.seg   records, each u32 length | u32 crc32 | payload
    {spool_dir}/{slot}/flushed        how far the database has them: two 16-byte places, written in turn
    {spool_dir}/{slot}/lock           held by the process that owns the slot
    {spool_dir}/{slot}/quarantine.seg what the database refused again and again
    {spool_dir}/{slot}/00000001.torn  a segment that could not be read to its end

One fsync serves every record that waits at that moment. A process starts a new segment each time, so bytes torn by a
crash are always the last of their segment, and were never acknowledged.
"""

import asyncio
import contextlib
import fcntl
import io
import itertools
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import structlog

from shared.errors import SpoolFull

log = structlog.get_logger()

SEGMENT_BYTES = 64 << 20

_HEAD = struct.Struct("<II")
_PLACE = struct.Struct("<QII")  # offset, segment, crc32 of the two


class Position(NamedTuple):
    """A place in the spool: everything before it."""

    segment: int
    offset: int


class _Waiting(NamedTuple):
    data: bytes
    done: "asyncio.Future[Position]"


class Spool:
    """The writer's side: `append` from the event loop, one thread that writes and syncs.

    `max_bytes` bounds what the database has not taken yet; `sync` False trusts the page cache (`durability: write`).
    """

    def __init__(self, folder: Path, *, max_bytes: int, sync: bool = True, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises BlockingIOError if another process owns the slot `folder`."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._lock = take_slot(folder)
        self._torn = False
        self.flushed = FlushedMark(folder / "flushed")
        self._end = Position(1 + max([*segments(folder), self.flushed.position.segment]), 0)
        self._file = _open_segment(folder, self._end.segment)
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self.grown = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="spool", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, root: Path, *, max_bytes: int, sync: bool = True) -> "Spool":
        """A spool in the first slot below `root` that no living process owns."""
        for number in itertools.count():
            with contextlib.suppress(BlockingIOError):
                return cls(root / str(number), max_bytes=max_bytes, sync=sync)
        raise AssertionError("unreachable")

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""
        return self._end

    def backlog_bytes(self) -> int:
        """Bytes on disk that the database has not taken yet."""
        done = self.flushed.position
        sizes = {number: _size(self.folder, number) for number in segments(self.folder) if number >= done.segment}
        return max(0, sum(sizes.values()) - (done.offset if done.segment in sizes else 0))

    def admit(self) -> None:
        """Raise SpoolFull when no more should be taken on."""
        if self.backlog_bytes() >= self._max_bytes:
            raise SpoolFull(f"the spool holds {self._max_bytes} bytes that the database has not taken")

    async def append(self, payloads: Sequence[bytes]) -> Position:
        """Return when all payloads are on disk, with the position after them. Raises SpoolFull if they cannot be."""
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        self._waiting.put(_Waiting(b"".join(_framed(payload) for payload in payloads), done))
        return await asyncio.shield(done)

    def close(self) -> None:
        """Write what waits, then let the slot go."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()
        self.flushed.close()
        self._lock.close()

    def _write_all(self) -> None:
        open_ = True
        while open_:
            group = [self._waiting.get()]
            while not self._waiting.empty():
                group.append(self._waiting.get())
            open_ = None not in group
            waiting = [each for each in group if each is not None]
            if waiting:
                self._write(waiting)

    def _write(self, group: Sequence[_Waiting]) -> None:
        data = b"".join(each.data for each in group)
        error: SpoolFull | None = None
        try:
            if self._torn or self._end.offset > self._segment_bytes:
                self._next_segment()
            _write_whole(self._file, data)
            if self._sync:
                os.fdatasync(self._file.fileno())
            self._end = Position(self._end.segment, self._end.offset + len(data))
        except OSError as reason:
            log.error("spool_write_failed", folder=str(self.folder), reason=reason.strerror)
            error = SpoolFull(f"cannot write to the spool: {reason.strerror}")
            self._torn = True
        for each in group:
            each.done.get_loop().call_soon_threadsafe(_settle, each.done, self._end, error)
        self.grown.set()

    def _next_segment(self) -> None:
        """Leave the segment, and whatever a failed write tore at its end, behind."""
        self._file.truncate(self._end.offset)
        following = _open_segment(self.folder, self._end.segment + 1)
        self._file.close()
        self._file, self._end, self._torn = following, Position(self._end.segment + 1, 0), False


class FlushedMark:
    """How far the database has the spool, kept in place so that a full disk cannot stop it from moving on."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open("r+b", buffering=0)
        data = self._file.read(2 * _PLACE.size).ljust(2 * _PLACE.size, b"\0")
        if len(data.strip(b"\0")) == 0:
            self._file.seek(0)
            self._file.write(bytes(2 * _PLACE.size))
        places = [_place(data[: _PLACE.size]), _place(data[_PLACE.size :])]
        self.position = max(places)
        self._next = places.index(min(places))

    def move(self, position: Position) -> None:
        """Say that everything before `position` is in the database."""
        body = struct.pack("<QI", position.offset, position.segment)
        self._file.seek(self._next * _PLACE.size)
        self._file.write(body + struct.pack("<I", zlib.crc32(body)))
        os.fdatasync(self._file.fileno())
        self._next = 1 - self._next
        self.position = position

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(folder: Path, start: Position, end: Position | None = None) -> Iterator[tuple[bytes, Position]]:
    """The payloads from `start` to `end` (None: all there is), each with the position after it."""
    for number in segments(folder):
        if number < start.segment or (end is not None and number > end.segment):
            continue
        offset = start.offset if number == start.segment else 0
        limit = end.offset if end is not None and number == end.segment else _size(folder, number)
        with _segment_path(folder, number).open("rb") as file:
            file.seek(offset)
            while offset < limit and (payload := _next_payload(file)) is not None:
                offset += _HEAD.size + len(payload)
                yield payload, Position(number, offset)
        if offset < limit:
            log.warning("spool_torn_tail", segment=number, offset=offset, bytes=limit - offset)
            _keep(folder, number)


def _keep(folder: Path, number: int) -> None:
    """Give a segment that cannot be read to its end a second name, under which it stays: its tail may be whole."""
    with contextlib.suppress(OSError):
        os.link(_segment_path(folder, number), folder / f"{number:08d}.torn")


def forget(folder: Path, before: Position) -> None:
    """Delete the segments that lie wholly before a position."""
    for number in segments(folder):
        if number < before.segment:
            _segment_path(folder, number).unlink(missing_ok=True)


def quarantine(folder: Path, payload: bytes) -> None:
    """Keep a record that the database refuses, out of the way of the others."""
    with (folder / "quarantine.seg").open("ab") as file:
        file.write(_framed(payload))
        file.flush()
        os.fsync(file.fileno())


def segments(folder: Path) -> list[int]:
    """The numbers of the segments, oldest first."""
    return sorted(int(path.stem) for path in folder.glob("*.seg") if path.stem.isdigit())


def slots(root: Path) -> list[Path]:
    """The folders of all processes, dead or alive, that ever spooled below `root`."""
    return sorted(path for path in root.glob("*") if path.name.isdigit())


def take_slot(folder: Path) -> BinaryIO:
    """Lock the slot for this process. Raises BlockingIOError if another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def _open_segment(folder: Path, number: int) -> io.FileIO:
    # Not "xb": an empty one may be left from when the disk was full. Whoever owns the slot is alone here.
    file = io.FileIO(_segment_path(folder, number), "wb")
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return file


def _write_whole(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _next_payload(file: BinaryIO) -> bytes | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    payload = file.read(length)
    # A record is never empty, but the zeros that a power cut may leave look like empty ones.
    return payload if length and len(payload) == length and zlib.crc32(payload) == crc else None


def _framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _place(data: bytes) -> Position:
    offset, segment, crc = _PLACE.unpack(data)
    return Position(segment, offset) if zlib.crc32(data[:12]) == crc else Position(0, 0)


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.seg"


def _size(folder: Path, number: int) -> int:
    try:
        return _segment_path(folder, number).stat().st_size
    except FileNotFoundError:  # the flusher was faster
        return 0


def _settle(done: "asyncio.Future[Position]", end: Position, error: SpoolFull | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(end)
