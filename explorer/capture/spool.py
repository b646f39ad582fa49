"""The local append-only log that a record must reach before its reply ends: "acknowledged" means on disk here.

How it lies there is said in `shared/spool_format.py`. One fsync serves every record that waits at that moment, or comes
within a millisecond where several came before. A process starts a new segment each time, so bytes torn by a crash are
always the last of their segment, and were never acknowledged.
"""

import asyncio
import contextlib
import errno
import fcntl
import io
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import structlog

from tuneloop.explorer.capture.spool_slots import FlushedMark, SharedEnd
from tuneloop.shared.errors import SpoolFull
from tuneloop.shared.held_files import no_link, open_unlinked
from tuneloop.shared.spool_format import (
    HEAD,
    Position,
    bytes_after,
    frames,
    next_payload,
    segment_path,
    segments,
    size_of,
)

log = structlog.get_logger()

SEGMENT_BYTES = 64 << 20

#: How long an fsync waits for more records when several came for the last one. Who is alone is not kept waiting.
_GATHER_S = 0.001

#: How much must go onto a disk that has refused a write before it counts as mended.
_PROOF = bytes(64 << 10)


class _Waiting(NamedTuple):
    data: bytes
    done: "asyncio.Future[Position] | None"  # None: nobody waits, a new segment is wanted


class Spool:
    """The writer's side: `append` from the event loop, one thread that writes and syncs.

    `sync` False trusts the page cache (`durability: write`), which takes a record at once: nobody waits for the thread.
    `broken` says why the disk refused the last write, None once it takes one again; `written` counts the bytes of this
    process. `end` is shared with the flusher, and `flushed` by it: it may be another process.
    """

    def __init__(self, folder: Path, *, sync: bool = True, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises BlockingIOError if another process owns the slot `folder`."""
        self.folder = folder
        self.broken: str | None = None
        self.written = 0
        self._sync = sync
        self._segment_bytes = segment_bytes
        self._lock = take_slot(folder)
        self.flushed = FlushedMark(folder / "flushed")
        self._left = {number: size_of(segment_path(folder, number)) for number in segments(folder)}
        self._end = Position(1 + max([*self._left, self.flushed.position.segment]), 0)
        self._file = _open_segment(folder, self._end.segment)
        self._shared_end = SharedEnd(folder)
        self._shared_end.move(self._end)
        self._writing = threading.Lock()
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="spool", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, root: Path, *, sync: bool = True) -> "Spool":
        """A spool in the first slot below `root` that no living process owns."""
        for number in itertools.count():
            with contextlib.suppress(BlockingIOError):
                return cls(root / str(number), sync=sync)
        raise AssertionError("unreachable")

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""
        return self._end

    def backlog_bytes(self) -> int:
        """Bytes on disk that the database has not taken yet. Cheap: nothing is read."""
        # In this order: whatever the writer and the flusher do meanwhile, no segment is counted twice.
        done, end = self.flushed.position, self._end
        return bytes_after(done, self._left | {end.segment: end.offset})

    def check(self) -> None:
        """See whether the folder is still where it was: what is written elsewhere would be found by nobody."""
        try:
            self._check_place()
        except OSError as error:
            self._break(error)

    def renew(self) -> None:
        """Begin a new segment, so that the old one can be forgotten, and see whether a broken disk is mended."""
        self._waiting.put(_Waiting(b"", None))

    async def append(self, payloads: Sequence[bytes]) -> Position:
        """Return when all payloads are on disk, with the position after them. Raises SpoolFull if they cannot be."""
        return await self.append_frames(frames(payloads))

    async def append_frames(self, data: bytes) -> Position:
        """The same for payloads that are framed already."""
        if not self._sync and self._writing.acquire(blocking=False):
            try:
                if not self.broken and self._end.offset <= self._segment_bytes:
                    self._put(data)
                    return self._end
            except OSError:  # the thread finds out what to do about it
                self._file.seek(self._end.offset)
            finally:
                self._writing.release()
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        self._waiting.put(_Waiting(data, done))
        return await done  # who is cancelled meanwhile has the records written all the same

    def close(self) -> None:
        """Write what waits, then let the slot go."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()
        self.flushed.close()
        self._shared_end.close()
        self._lock.close()

    def _write_all(self) -> None:
        open_, crowded = True, False
        while open_:
            group = [self._waiting.get()]
            if crowded and self._sync:
                time.sleep(_GATHER_S)
            while not self._waiting.empty():
                group.append(self._waiting.get())
            open_, crowded = None not in group, len(group) > 1
            waiting = [each for each in group if each is not None]
            if waiting:
                with self._writing:
                    self._write(waiting)

    def _write(self, group: Sequence[_Waiting]) -> None:
        data = b"".join(each.data for each in group)
        error: SpoolFull | None = None
        try:
            self._check_place()
            renewed = any(each.done is None for each in group)
            if renewed or self.broken or self._end.offset > self._segment_bytes:
                self._begin_segment()
            if renewed and self.broken:
                # Write what is no record and take it away again.
                _write_whole(self._file, _PROOF)
                os.fdatasync(self._file.fileno())
                self._file.truncate(0)
                self._file.seek(0)
            self._put(data)
            if self.broken:
                log.info("spool_written_again", folder=str(self.folder))
            self.broken = None
        except OSError as reason:
            error = SpoolFull(self._break(reason))
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[Position]]] = {}
        for each in group:
            if each.done:
                waiting.setdefault(each.done.get_loop(), []).append(each.done)
        for loop, futures in waiting.items():  # told at once: to wake a loop costs as much as a small write
            loop.call_soon_threadsafe(_settle, futures, self._end, error)

    def _put(self, data: bytes) -> None:
        _write_whole(self._file, data)
        if self._sync:
            os.fdatasync(self._file.fileno())
        self._check_place()
        if not _lies_at(segment_path(self.folder, self._end.segment), self._file.fileno()):
            raise OSError(errno.ESTALE, "a segment was deleted or replaced")
        self._reach(Position(self._end.segment, self._end.offset + len(data)))
        self.written += len(data)

    def _check_place(self) -> None:
        if not _lies_at(self.folder / "lock", self._lock.fileno()):
            raise OSError(errno.ESTALE, f"{self.folder} was deleted or moved: put it back, or restart the explorer")

    def _break(self, reason: OSError) -> str:
        if not self.broken:
            log.error("spool_write_failed", folder=str(self.folder), reason=reason.strerror)
        self.broken = f"cannot write to the spool: {reason.strerror}"
        return self.broken

    def _reach(self, end: Position) -> None:
        self._end = end
        self._shared_end.move(end)

    def _begin_segment(self) -> None:
        """Leave the segment, and whatever a failed write tore at its end, behind; one that holds nothing is kept."""
        self._file.truncate(self._end.offset)
        if not self._end.offset:
            self._file.seek(0)
            return
        following = _open_segment(self.folder, self._end.segment + 1)
        self._file.close()
        held = {number: size for number, size in self._left.items() if number >= self.flushed.position.segment}
        self._left = held | {self._end.segment: self._end.offset}
        self._file = following
        self._reach(Position(self._end.segment + 1, 0))


def read(folder: Path, start: Position, end: Position | None = None) -> Iterator[tuple[bytes, Position]]:
    """The payloads from `start` to `end` (None: all there is), each with the position after it."""
    for number in segments(folder):
        if number < start.segment or (end is not None and number > end.segment):
            continue
        offset = start.offset if number == start.segment else 0
        limit = end.offset if end is not None and number == end.segment else size_of(segment_path(folder, number))
        with open_unlinked(segment_path(folder, number)) as file:
            file.seek(offset)
            while offset < limit and (payload := next_payload(file)) is not None:
                offset += HEAD.size + len(payload)
                yield payload, Position(number, offset)
        if offset < limit:
            log.warning("spool_torn_tail", segment=number, offset=offset, bytes=limit - offset)
            with contextlib.suppress(OSError):
                os.link(segment_path(folder, number), folder / f"{number:08d}.torn")


def forget(folder: Path, before: Position) -> None:
    """Delete the segments that lie wholly before a position."""
    for number in segments(folder):
        if number < before.segment:
            segment_path(folder, number).unlink(missing_ok=True)


def take_slot(folder: Path) -> BinaryIO:
    """Lock the slot for this process. Raises BlockingIOError if another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(no_link(folder / "lock", os.O_WRONLY | os.O_CREAT), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def _open_segment(folder: Path, number: int) -> io.FileIO:
    # Not "xb": an empty one may be left from when the disk was full. Whoever owns the slot is alone here.
    file = io.FileIO(segment_path(folder, number), "wb", opener=no_link)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return file


def _lies_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _write_whole(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _settle(waiting: "Sequence[asyncio.Future[Position]]", end: Position, error: SpoolFull | None) -> None:
    for done in waiting:
        if done.done():
            continue
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(end)
