"""The format of an explorer's spool on disk, readable without its locks while it is written to.

Each process has a slot:

    {spool_dir}/{slot}/00000001.seg   records, each u32 length | u32 crc32 | payload
    {spool_dir}/{slot}/flushed        how far the database has them: two 16-byte positions, written in turn
    {spool_dir}/{slot}/end            how far its process has written: one such position, valid while the process lives
    {spool_dir}/{slot}/lock           held by the process that owns the slot
    {spool_dir}/{slot}/quarantine.seg records that the database refused repeatedly
    {spool_dir}/refused               why the database refuses what it is given, while it does, as JSON
    {spool_dir}/{slot}/00000001.torn  a segment that could not be read to its end
    {spool_dir}/{slot}/00000001.kept  a segment whose records the database had, and has lost
"""

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from tuneloop.shared import steady_time
from tuneloop.shared.experience import Exchange, decode, time_received
from tuneloop.shared.held_files import open_unlinked, read_unlinked
from tuneloop.shared.steady_time import SteadyClock

HEAD = struct.Struct("<II")
POSITION = struct.Struct("<QII")  # offset, segment, crc32 of the two

QUARANTINE = "quarantine.seg"
REFUSAL = "refused"


class Position(NamedTuple):
    """A position in the spool: everything before it."""

    segment: int
    offset: int


class SpoolStatus(NamedTuple):
    """The state of all slots below a spool's root: `bytes` wait for the database, the oldest of them `since` then."""

    slots: int
    bytes: int
    since: float | None
    quarantined_bytes: int
    refused: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Why the database refuses records now, in its own words, and since when (seconds since 1970)."""

    reason: str
    since: float


def refusal_of(root: Path) -> Refusal | None:
    """Why the database refuses what the spool below `root` holds; None while it takes it, or is merely away."""
    try:
        return msgspec.json.decode(read_unlinked(root / REFUSAL), type=Refusal)
    except (FileNotFoundError, msgspec.MsgspecError):  # being written just now: the next look tells
        return None


def note_refusal(root: Path, refusal: Refusal | None) -> None:
    """Write down for all processes why the database refuses, or that it does not any more."""
    if refusal is None:
        (root / REFUSAL).unlink(missing_ok=True)
        return
    draft = root / f"{REFUSAL}.partial"
    draft.write_bytes(msgspec.json.encode(refusal))
    draft.replace(root / REFUSAL)


def spool_status(root: Path, clock: SteadyClock = steady_time.now) -> SpoolStatus:
    """The totals over the slots of all processes; what has waited since when by this clock."""
    folders = slots(root)
    waits = [recorded_at(*found, clock) for slot in folders if (found := next_after(slot, flushed_of(slot)))]
    quarantined = sum(size_of(slot / QUARANTINE) for slot in folders)
    refusal = refusal_of(root)
    backlog = sum(map(backlog_of, folders))
    return SpoolStatus(
        len(folders), backlog, min(waits, default=None), quarantined, refusal.reason if refusal else None
    )


def slots(root: Path) -> list[Path]:
    """The folders of all processes, dead or alive, that ever spooled below `root`."""
    return sorted(path for path in root.glob("*") if path.name.isdigit() and not path.is_symlink())


def is_taken(slot: Path) -> bool:
    """Whether a process that lives on this machine owns the slot."""
    with contextlib.suppress(FileNotFoundError), (slot / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def segments(folder: Path) -> list[int]:
    """The numbers of the segments, oldest first; none of a folder that is gone, goes meanwhile, or may not be read."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return sorted(int(stem) for stem, suffix in map(os.path.splitext, names) if suffix == ".seg" and stem.isdigit())


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}.seg"


def size_of(path: Path) -> int:
    """The bytes of a file, 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the flusher was faster
        return 0


def flushed_of(folder: Path) -> Position:
    """How far the database has a slot that may be another process's."""
    try:
        return max(parse_positions((folder / "flushed").read_bytes()))
    except FileNotFoundError:
        return Position(0, 0)


def parse_positions(data: bytes) -> list[Position]:
    """The two positions of `flushed`; a torn one is the beginning."""
    return [parse_position(data[: POSITION.size]), parse_position(data[POSITION.size : 2 * POSITION.size])]


def backlog_of(folder: Path) -> int:
    """Bytes of a slot, of any process, that the database has not taken yet."""
    done = flushed_of(folder)
    return bytes_after(done, {number: size_of(segment_path(folder, number)) for number in segments(folder)})


def bytes_after(done: Position, sizes: Mapping[int, int]) -> int:
    """How many bytes of segments of those sizes come after `done`."""
    held = sum(size for number, size in sizes.items() if number >= done.segment)
    return max(0, held - (done.offset if done.segment in sizes else 0))


def next_after(folder: Path, done: Position) -> tuple[Path, bytes | None] | None:
    """The segment that holds the first bytes after `done`, and the record there if they are one; None if all is done.

    A writer may be in the middle of a record.
    """
    for number in segments(folder):
        offset = done.offset if number == done.segment else 0
        path = segment_path(folder, number)
        if number < done.segment or size_of(path) <= offset:
            continue
        with contextlib.suppress(FileNotFoundError), open_unlinked(path) as file:
            file.seek(offset)
            return path, next_payload(file)
    return None


def recorded_at(segment: Path, payload: bytes | None, clock: SteadyClock = steady_time.now) -> float:
    """When the record was written; for bytes that are none, when their segment was last written to."""
    if payload is not None:
        try:
            record = decode(payload)
        except msgspec.MsgspecError:
            pass
        else:
            return time_received(record, clock) + (record.latency_s if isinstance(record, Exchange) else 0.0)
    try:
        return segment.stat().st_mtime
    except FileNotFoundError:  # the flusher was faster
        return clock()


def payloads_before(slot: Path, done: Position) -> Iterator[bytes]:
    """The records that are still in the slot although the database has taken them, oldest first."""
    for path in sorted(slot.glob("*.kept")):
        with open_unlinked(path) as file:
            yield from iter(partial(next_payload, file), None)
    with contextlib.suppress(FileNotFoundError), open_unlinked(segment_path(slot, done.segment)) as file:
        while file.tell() < done.offset and (payload := next_payload(file)) is not None:
            yield payload


def keep_segment(slot: Path, number: int) -> None:
    """Give a segment a second name, under which it stays when the database has all of it."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(segment_path(slot, number), slot / f"{number:08d}.kept")


def frame(payload: bytes) -> bytes:
    """A record as it lies on disk."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def frames(payloads: Iterable[bytes]) -> bytes:
    """Records as they lie on disk, one after the other."""
    return b"".join([frame(each) for each in payloads])


def next_payload(file: BinaryIO) -> bytes | None:
    """The record that begins here, None if what is there is not a whole one."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, crc = HEAD.unpack(head)
    payload = file.read(length)
    # A record is never empty, but the zeros that a power cut may leave look like empty ones.
    return payload if length and len(payload) == length and zlib.crc32(payload) == crc else None


def parse_position(data: bytes) -> Position:
    """A position; a torn one is the beginning."""
    if len(data) < POSITION.size:
        return Position(0, 0)
    offset, segment, crc = POSITION.unpack(data)
    return Position(segment, offset) if zlib.crc32(data[:12]) == crc else Position(0, 0)
