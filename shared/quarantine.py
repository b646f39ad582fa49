"""The records that the database refused: kept in the slot of the spool that they came from, until they are put back.

The file of a slot grows while its explorer runs, and shrinks when records are retried or people are erased: each holds
`quarantine.lock` meanwhile.
"""

import fcntl
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.shared.experience import Record, decode
from tuneloop.shared.held_files import append_unlinked, new_unlinked, no_link, read_unlinked
from tuneloop.shared.spool_format import HEAD, QUARANTINE, frame, next_payload, slots

# How a record begins. Behind damage, where its length cannot be trusted, the next one is found by it.
_RECORD = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type\xa8(?:exchange|feedback)", re.DOTALL)

_DRAFT = ".partial"


class Piece(NamedTuple):
    """Some bytes of a file of records; `record` None if they are none of this release."""

    data: bytes
    record: Record | None

    @property
    def name(self) -> str:
        """What people call it: the same as long as it lies there."""
        return hashlib.sha256(self.data).hexdigest()[:12]


class Retried(NamedTuple):
    """What became of a record that was offered to the database again; `refused` None: the database has it."""

    piece: Piece
    refused: str | None


@contextmanager
def keeping(slot: Path) -> Iterator[None]:
    """Be the only one, in any process, who changes the files of a slot that stay."""
    with open(slot / "quarantine.lock", "wb", opener=no_link) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for draft in slot.glob(f"*{_DRAFT}"):  # left by a process that was killed: others are made under the lock
            draft.unlink(missing_ok=True)
        yield


def clear_drafts(slot: Path) -> None:
    """Delete what a process that was killed has left half written in a slot."""
    if any(slot.glob(f"*{_DRAFT}")):
        with keeping(slot):
            pass


def set_aside(slot: Path, payload: bytes) -> None:
    """Keep a record that the database refuses, out of the way of the others. Raises OSError if the disk is full."""
    with keeping(slot), append_unlinked(slot / QUARANTINE) as file:
        file.write(frame(payload))
        file.flush()
        os.fsync(file.fileno())


def pieces_below(root: Path) -> Iterator[tuple[Path, Piece]]:
    """Everything in quarantine below `root`, with its slot, in the order in which it came there."""
    for slot in slots(root):
        path = slot / QUARANTINE
        if path.exists():
            yield from ((slot, piece) for piece in pieces_of(read_unlinked(path)))


def retry(slot: Path, wanted: Callable[[Piece], bool], record: Callable[[Record], None]) -> Iterator[Retried]:
    """Offer the wanted records of a slot again by `record`, and take out those that go in.

    `record` raises ValueError for what is refused. A record that went in twice does no harm: it has one id.
    """
    path = slot / QUARANTINE
    with keeping(slot):
        if not path.exists():
            return
        pieces = list(pieces_of(read_unlinked(path)))
        done = [_offer(piece, record) for piece in pieces if wanted(piece)]
        gone = {id(each.piece) for each in done if each.refused is None}
        if gone:
            replace_pieces(path, [piece for piece in pieces if id(piece) not in gone])
    yield from done


def _offer(piece: Piece, record: Callable[[Record], None]) -> Retried:
    if piece.record is None:
        return Retried(piece, "no record of this release")
    try:
        record(piece.record)
    except ValueError as error:
        return Retried(piece, str(error))
    return Retried(piece, None)


def pieces_of(data: bytes) -> Iterator[Piece]:
    """The file in pieces that together are all of it: frames with their records, and what is between them."""
    offset = 0
    while offset < len(data):
        end, record = _frame_at(data, offset) or (_next_frame(data, offset), None)
        yield Piece(data[offset:end], record)
        offset = end


def replace_pieces(path: Path, pieces: Collection[Piece]) -> None:
    """Write the file anew with these pieces; without any, it goes. The caller keeps the slot."""
    if not pieces:
        path.unlink()
        return
    draft = path.with_suffix(_DRAFT)
    with new_unlinked(draft) as file:
        shutil.copymode(path, draft)
        file.write(b"".join(piece.data for piece in pieces))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _frame_at(data: bytes, offset: int) -> tuple[int, Record | None] | None:
    file = io.BytesIO(data)
    file.seek(offset)
    payload = next_payload(file)
    if payload is None:
        return None
    try:
        return file.tell(), decode(payload)
    except msgspec.MsgspecError:
        return file.tell(), None


def _next_frame(data: bytes, offset: int) -> int:
    for found in _RECORD.finditer(data, offset + HEAD.size + 1):
        at = found.start() - HEAD.size
        if _frame_at(data, at) is not None:
            return at
    return len(data)
