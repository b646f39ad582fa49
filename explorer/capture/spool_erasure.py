"""Takes an erased person's records out of the files that a spool keeps for good: its quarantine, and torn segments."""

import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.explorer.capture.spool import keeping
from tuneloop.shared.experience import Record, decode
from tuneloop.shared.ledger.recording.erasures import Person, without_erased
from tuneloop.shared.spool_format import HEAD, QUARANTINE, next_payload

# How a record begins. Behind damage, where its length cannot be trusted, the next one is found by it.
_RECORD = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type\xa8(?:exchange|feedback)", re.DOTALL)


class _Piece(NamedTuple):
    data: bytes
    record: Record | None


class Cleared(NamedTuple):
    """The records that were taken out of a file, and the bytes in it that are no record and were left."""

    removed: int
    unread_bytes: int


def kept_files(slot: Path) -> list[Path]:
    """The files of a slot that are not deleted when the database has what the spool held."""
    return sorted([*slot.glob("*.torn"), *slot.glob(QUARANTINE)])


def clear(path: Path, erased: Mapping[Person, float]) -> Cleared:
    """Write the file anew without what the erased people had said until then. The caller holds the slot."""
    with keeping:
        pieces = list(_pieces(path.read_bytes()))
        kept = {
            id(record) for record in without_erased((each.record for each in pieces if each.record is not None), erased)
        }
        left = [each for each in pieces if each.record is None or id(each.record) in kept]
        if len(left) < len(pieces):
            _replace(path, b"".join(each.data for each in left))
    return Cleared(len(pieces) - len(left), sum(len(each.data) for each in left if each.record is None))


def _pieces(data: bytes) -> Iterator[_Piece]:
    """The file in pieces that together are all of it: frames with their records, and what is between them."""
    offset = 0
    while offset < len(data):
        end, record = _frame(data, offset) or (_next_frame(data, offset), None)
        yield _Piece(data[offset:end], record)
        offset = end


def _frame(data: bytes, offset: int) -> tuple[int, Record | None] | None:
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
        if _frame(data, at) is not None:
            return at
    return len(data)


def _replace(path: Path, data: bytes) -> None:
    if not data:
        path.unlink()
        return
    draft = path.with_suffix(".partial")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
