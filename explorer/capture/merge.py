"""Reads several slots at once, and lets tenants take turns: what one says much of keeps nobody else waiting.

What was said on one machine by one tenant comes in the order in which it was said. Tenants have no row in common, so
theirs need no order beside each other.
"""

import contextlib
import errno
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterator, Sequence
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

#: Records that go into the database in one transaction, and their bytes.
GROUP, GROUP_BYTES = 512, 32 << 20
_SMALLEST = 8

#: The work that one transaction may be: while it lasts nobody else's is done.
_LONGEST_S = 0.5

#: How far the queue looks ahead for those who have said less.
AHEAD, AHEAD_BYTES = 1 << 17, 64 << 20


class Source(NamedTuple):
    """A slot to be read from `mark` to `end`; None: all that the `segments` hold."""

    folder: Path
    mark: FlushedMark
    end: Position | None
    segments: Sequence[int] = ()


class SlotRecord(NamedTuple):
    """A record of a slot, and the position after it there."""

    folder: Path
    payload: bytes
    position: Position


class SlotQueue:
    """What has been read of the slots and is not in the database yet, by tenant.

    `take` gives the next group, `done` is told when the database has it. Not safe for threads but for `is_done`.
    """

    def __init__(self, *, ahead: int = AHEAD, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._most, self._most_bytes = ahead, ahead_bytes
        self.clear()

    def clear(self) -> None:
        """Forget what was read: it is read again."""
        self._read: dict[Path, Position] = {}
        self._waiting: dict[str, deque[SlotRecord]] = {}
        self._undone: dict[Path, deque[Position]] = {}
        self._ahead: dict[Path, set[Position]] = defaultdict(set)
        self._of_tenant: dict[str, dict[Path, deque[Position]]] = {}
        self._sizes: dict[str, int] = {}
        self._count = self._bytes = 0

    def __len__(self) -> int:
        """The records that wait."""
        return self._count

    def read(self, sources: Sequence[Source]) -> bool:
        """Read on as far as there is room; False if there is more. Slots that are not named are forgotten."""
        self._keep({source.folder for source in sources})
        for source in sources:
            self._read[source.folder] = max(source.mark.position, self._read.get(source.folder, source.mark.position))
        entries = _in_order(sources, self._read)
        with contextlib.closing(entries):
            for entry in entries:
                self._put(entry)
                if self._count >= self._most or self._bytes >= self._most_bytes:
                    return False
        for source in sources:
            if source.end is not None:
                self._read[source.folder] = max(source.end, self._read[source.folder])
        return True

    def take(self) -> list[SlotRecord]:
        """The next group: records of the tenant whose turn it is, and of others all that are quickly done."""
        group: list[SlotRecord] = []
        size = 0
        for tenant in list(self._waiting):
            waiting = self._waiting[tenant]
            most = self._sizes.get(tenant, GROUP)
            if group and (most < GROUP or len(group) + len(waiting) > GROUP):
                continue
            del self._waiting[tenant]
            count = 0
            while waiting and count < most and len(group) < GROUP and (not group or size < GROUP_BYTES):
                size += len(waiting[0].payload)
                group.append(waiting.popleft())
                count += 1
            if waiting:
                self._waiting[tenant] = waiting  # behind all others
            if most < GROUP:
                break  # its group is its own
        self._count -= len(group)
        self._bytes -= size
        return group

    def done(self, group: Sequence[SlotRecord], seconds: float) -> dict[Path, Position]:
        """How far each slot of a group is done now, which took so much work."""
        tenants = {_tenant_of(entry.payload) for entry in group}
        for tenant in tenants:
            size = self._sizes.get(tenant, GROUP)
            if seconds > _LONGEST_S:
                self._sizes[tenant] = max(_SMALLEST, min(size, len(group)) // 2)
            elif seconds < _LONGEST_S / 4 and tenant in self._sizes:
                self._sizes[tenant] = 2 * size
                if self._sizes[tenant] >= GROUP:
                    del self._sizes[tenant]
        for entry in group:
            self._ahead[entry.folder].add(entry.position)
            of_tenant = self._of_tenant[_tenant_of(entry.payload)]
            of_tenant[entry.folder].popleft()
            if not of_tenant[entry.folder]:
                del of_tenant[entry.folder]
        for tenant in tenants:
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        return {folder: last for folder in {entry.folder for entry in group} if (last := self._done_up_to(folder))}

    def is_done(self, tenant: str, folder: Path, end: Position) -> bool:
        """Whether all of a tenant that lies before `end` in a slot is done."""
        first = self._of_tenant.get(tenant, {}).get(folder)
        return self._read.get(folder, Position(0, 0)) >= end and (not first or first[0] > end)

    def position(self, source: Source) -> Position:
        """How far a slot has been read."""
        return max(source.mark.position, self._read[source.folder])

    def _put(self, entry: SlotRecord) -> None:
        tenant = _tenant_of(entry.payload)
        self._waiting.setdefault(tenant, deque()).append(entry)
        self._of_tenant.setdefault(tenant, {}).setdefault(entry.folder, deque()).append(entry.position)
        self._undone.setdefault(entry.folder, deque()).append(entry.position)
        self._read[entry.folder] = entry.position
        self._count += 1
        self._bytes += len(entry.payload)

    def _done_up_to(self, folder: Path) -> Position | None:
        """The position before which nothing is undone, if that has moved."""
        last, undone, ahead = None, self._undone[folder], self._ahead[folder]
        while undone and undone[0] in ahead:
            last = undone.popleft()
            ahead.discard(last)
        return last

    def _keep(self, folders: Collection[Path]) -> None:
        if not self._read.keys() <= set(folders):
            sizes = self._sizes  # what is another's by now, or was moved away: all is read again
            self.clear()
            self._sizes = sizes


class _Head(msgspec.Struct):
    """What both kinds of records have of a tenant; msgspec skips the rest."""

    tenant: str


_heads = msgspec.msgpack.Decoder(_Head)


def _tenant_of(payload: bytes) -> str:
    """Whose a record is; nobody's if it is none."""
    try:
        return _heads.decode(payload).tenant
    except msgspec.MsgspecError:  # it is set aside later
        return ""


def _in_order(sources: Sequence[Source], starts: dict[Path, Position]) -> Generator[SlotRecord]:
    """The records of all the slots: those of each in their order, and feedback of several by its stamps.

    What was said before the machine was last started comes before what was said since.
    """
    full = [(source, starts[source.folder]) for source in sources]
    full = [(source, start) for source, start in full if source.end is None or source.end > start]
    if len(full) == 1:
        yield from _entries(*full[0])
        return
    merged = heapq.merge(*itertools.starmap(_with_order, full), key=lambda each: each[0])
    for _order, entry in merged:
        yield entry


def _entries(source: Source, start: Position) -> Iterator[SlotRecord]:
    _check_place(source)
    for payload, position in spool.read(source.folder, start, source.end):
        yield SlotRecord(source.folder, payload, position)
    _check_place(source)


def _check_place(source: Source) -> None:
    """A folder that was moved away looks empty: what it holds must not count as read."""
    if source.end is not None and not segment_path(source.folder, source.end.segment).exists():
        raise FileNotFoundError(errno.ENOENT, "the folder of a slot was deleted or moved", str(source.folder))


def _with_order(source: Source, start: Position) -> Iterator[tuple[tuple[bool, float], SlotRecord]]:
    order = (False, 0.0)
    for entry in _entries(source, start):
        order = max(order, _order_of(entry.payload))
        yield order, entry


def _order_of(payload: bytes) -> tuple[bool, float]:
    if _FEEDBACK not in payload[:24]:
        return False, 0.0
    try:
        record = decode(payload)
    except msgspec.MsgspecError:  # it is set aside later
        return False, 0.0
    if not isinstance(record, Feedback) or record.stamp is None:
        return False, 0.0
    return record.stamp.boot == boot(), record.stamp.seconds
