"""Reads several slots at once, so that what was said on one machine comes in the order in which it was said."""

import errno
import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.spool_slots import FlushedMark
from tuneloop.shared.experience import Feedback, decode
from tuneloop.shared.spool_format import Position, segment_path
from tuneloop.shared.steady_time import boot

#: What feedback has among its first bytes. An exchange is not decoded for its place in the order: it has none.
_FEEDBACK = b"\xa8feedback"


class Source(NamedTuple):
    """A slot to be read from `mark` to `end`; None: all that the `segments` hold."""

    folder: Path
    mark: FlushedMark
    end: Position | None
    segments: Sequence[int] = ()


class SlotRecord(NamedTuple):
    """A record of a slot, and the position after it there."""

    source: Source
    payload: bytes
    position: Position


def in_order(sources: Sequence[Source]) -> Iterator[SlotRecord]:
    """The records of all the slots: those of each in their order, and feedback of several by its stamps.

    What was said before the machine was last started comes before what was said since.
    """
    full = [source for source in sources if source.end is None or source.end > source.mark.position]
    if len(full) == 1:
        return _entries(full[0])
    merged = heapq.merge(*map(_with_order, full), key=lambda each: each[0])
    return (entry for _order, entry in merged)


def _entries(source: Source) -> Iterator[SlotRecord]:
    _check_place(source)
    for payload, position in spool.read(source.folder, source.mark.position, source.end):
        yield SlotRecord(source, payload, position)
    _check_place(source)


def _check_place(source: Source) -> None:
    """A folder that was moved away looks empty: what it holds must not count as read."""
    if source.end is not None and not segment_path(source.folder, source.end.segment).exists():
        raise FileNotFoundError(errno.ENOENT, "the folder of a slot was deleted or moved", str(source.folder))


def _with_order(source: Source) -> Iterator[tuple[tuple[bool, float], SlotRecord]]:
    order = (False, 0.0)
    for entry in _entries(source):
        order = max(order, _order(entry.payload))
        yield order, entry


def _order(payload: bytes) -> tuple[bool, float]:
    if _FEEDBACK not in payload[:24]:
        return False, 0.0
    try:
        record = decode(payload)
    except msgspec.MsgspecError:  # it is set aside later
        return False, 0.0
    if not isinstance(record, Feedback) or record.stamp is None:
        return False, 0.0
    return record.stamp.boot == boot(), record.stamp.seconds
