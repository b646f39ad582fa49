"""The slots below a spool's root that our own writers fill, in this process or in others of ours."""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from tuneloop.shared.held_files import change_unlinked
from tuneloop.shared.spool_format import (
    POSITION,
    Position,
    flushed_of,
    is_taken,
    parse_position,
    parse_positions,
    segment_path,
    segments,
    size_of,
)
from tuneloop.shared.spool_format import slots as slots_in

log = structlog.get_logger()

#: How long a slot whose owner neither moves it nor ends is waited for: a process may be stopped for ever.
PREDECESSOR_PATIENCE_S = 30.0


class FlushedMark:
    """How far the database has the spool, kept in place so that a full disk cannot stop it from moving on.

    One moves it, others may look at the same time, in other processes too.
    """

    def __init__(self, path: Path) -> None:
        self._file = change_unlinked(path)
        data = self._file.read(2 * POSITION.size) or b""
        if len(data.strip(b"\0")) == 0 or len(data) < 2 * POSITION.size:
            self._file.seek(0)
            self._file.write(data.ljust(2 * POSITION.size, b"\0"))
        self._map = mmap.mmap(self._file.fileno(), 2 * POSITION.size, access=mmap.ACCESS_READ)
        self._seen, self._position = b"", Position(0, 0)

    @property
    def position(self) -> Position:
        """Everything before this is in the database. Cheap: it is asked for with every request."""
        if not self._map.closed and (data := self._map[:]) != self._seen:
            # One of the two may be half written just now; the other is older, but right.
            self._seen, self._position = data, max(self._position, *parse_positions(data))
        return self._position

    def move(self, position: Position) -> None:
        """Say that everything before `position` is in the database."""
        both = parse_positions(self._map[:])
        self._file.seek(both.index(min(both)) * POSITION.size)
        self._file.write(_place(position))
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._position = self.position
        self._map.close()
        self._file.close()


class SharedEnd:
    """Where a slot's living writer is: everything before is on disk. It tells so in memory that its flusher shares."""

    def __init__(self, folder: Path) -> None:
        path = folder / "end"
        with change_unlinked(path) as file:
            if size_of(path) < POSITION.size:
                file.write(bytes(POSITION.size))  # a hole in the file could not be filled on a full disk
            self._map = mmap.mmap(file.fileno(), POSITION.size)
        self._last = Position(0, 0)

    @property
    def position(self) -> Position:
        """What was last told; while the writer is just telling, what it told before."""
        if not self._map.closed:
            self._last = max(self._last, parse_position(self._map[:]))
        return self._last

    def move(self, position: Position) -> None:
        """Tell the flusher."""
        self._map[:] = _place(position)

    def close(self) -> None:
        """Share no more."""
        self._map.close()


def _place(position: Position) -> bytes:
    body = struct.pack("<QI", position.offset, position.segment)
    return body + struct.pack("<I", zlib.crc32(body))


class Slot(Protocol):
    """A slot and its writer, as those see it who move what it holds: a Spool, or one in another process."""

    @property
    def folder(self) -> Path:
        """Where it lies."""

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""

    @property
    def flushed(self) -> FlushedMark:
        """How far the database has it."""

    def renew(self) -> None:
        """Begin a new segment, so that the old one can be forgotten."""


class Slots:
    """The slots of those of our writers that live, or have died and left something that is not in the database yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ours: dict[Path, Slot] = {}
        self._left: set[Path] = set()

    @property
    def ours(self) -> list[Slot]:
        """Living and dead."""
        return list(self._ours.values())

    def add(self, slot: Slot) -> None:
        """A writer begins in a slot; perhaps in one where another has died."""
        self._left.discard(slot.folder)
        self._ours[slot.folder] = slot

    def leave(self, slot: Slot) -> None:
        """The writer is no more."""
        if self._ours.get(slot.folder) is slot:
            self._left.add(slot.folder)

    def lives(self, folder: Path) -> bool:
        """Whether a writer of ours is there."""
        return folder in self._ours and folder not in self._left

    def mark_adopted(self, folder: Path) -> None:
        """Nothing is left of what a dead writer wrote."""
        if folder in self._left:
            self._left.discard(folder)
            slot = self._ours.pop(folder, None)
            if isinstance(slot, RemoteSlot):
                slot.close()

    def close(self) -> None:
        """Look no more at those that other processes fill."""
        for slot in self._ours.values():
            if isinstance(slot, RemoteSlot):
                slot.close()


class RemoteSlot:
    """A slot that another process of ours fills. `renew` may be called from any thread."""

    def __init__(self, folder: Path, renew: Callable[[], None]) -> None:
        self.folder = folder
        self.flushed = FlushedMark(folder / "flushed")
        self._end = SharedEnd(folder)
        self._renew = renew

    @property
    def end(self) -> Position:
        """Everything before this is on disk."""
        return self._end.position

    def renew(self) -> None:
        """Have the other process begin a new segment."""
        self._renew()

    def close(self) -> None:
        """Look there no more: what was last seen stays."""
        self.flushed.close()
        self._end.close()


class Predecessors:
    """What other processes had written below the root when we began, and the database did not have.

    The disk may keep a killed process, and its lock, for seconds after its last word. What it wrote comes before what
    our writers write: it could be taken for a correction else, and a commit would miss it.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._until = time.monotonic() + PREDECESSOR_PATIENCE_S
        self._ends: dict[Path, Position] = {}
        for folder in slots_in(slots.root):
            # The end of what lies there, whether its writer has told of it or not.
            number = max(segments(folder), default=0)
            end = Position(number, size_of(segment_path(folder, number)))
            if self._waits(folder, end):
                self._ends[folder] = end

    @property
    def hold(self) -> bool:
        """Whether one of them still has its slot, and something in it that must come before ours."""
        self._ends = {folder: end for folder, end in self._ends.items() if self._waits(folder, end)}
        if self._ends and time.monotonic() > self._until:
            log.warning("spool_not_waited_for", folders=[str(each) for each in self._ends])
            self._ends = {}
        return bool(self._ends)

    def _waits(self, folder: Path, end: Position) -> bool:
        return not self._slots.lives(folder) and flushed_of(folder) < end and is_taken(folder)
