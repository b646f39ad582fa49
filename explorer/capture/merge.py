"""Reads several slots at once, and lets tenants and their keys take turns: who says much keeps nobody else waiting.

What was said on one machine by one key comes in the order in which it was said, and so does all that is moved together.
Tenants have no row in common; of two keys of one tenant, who says much comes behind.
"""

import contextlib
import errno
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.explorer.capture import spool
from tuneloop.explorer.capture.spool_slots import FlushedMark
from tuneloop.shared.experience import Feedback, decode
from tuneloop.shared.spool_format import Position, segment_path

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
    """A record of a slot, the position after it there, whose it is, and its place among all that were read.

    It `affects_rewards` if it is feedback, or a reply of a run, which feedback about the run may be about.
    """

    folder: Path
    payload: bytes
    position: Position
    owner: "Owner"
    affects_rewards: bool
    number: int = 0


class Owner(NamedTuple):
    """Who has turns: a key of a tenant, or all that come to it without one."""

    tenant: str
    key: str


class SlotQueue:
    """What has been read of the slots and is not in the database yet, by tenant and key.

    `take` gives the next group, `finish` is called when the database has it. Not safe for threads.
    """

    def __init__(self, *, ahead: int = AHEAD, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._most, self._most_bytes = ahead, ahead_bytes
        self.clear()

    def clear(self) -> None:
        """Forget what was read: it is read again."""
        self._read: dict[Path, Position] = {}
        self._waiting: dict[str, dict[str, deque[SlotRecord]]] = {}
        self._undone: dict[Path, deque[Position]] = {}
        self._ahead: dict[Path, set[Position]] = defaultdict(set)
        self._all, self._affecting = _Undone(), _Undone()
        self._sizes: dict[Owner, int] = {}
        self._numbers = itertools.count()
        self._count = self._bytes = 0

    def __len__(self) -> int:
        """The records that wait."""
        return self._count

    def read(self, sources: Sequence[Source]) -> bool:
        """Read on as far as there is room; False if there is more. Slots that are not named are forgotten."""
        folders = {source.folder for source in sources}
        if not self._read.keys() <= set(folders):
            sizes = self._sizes  # what is another's by now, or was moved away: all is read again
            self.clear()
            self._sizes = sizes
        for source in sources:
            self._read[source.folder] = max(source.mark.position, self._read.get(source.folder, source.mark.position))
        entries = _in_order(sources, self._read)
        with contextlib.closing(entries):
            for entry in entries:
                tenant, key = entry.owner
                numbered = entry._replace(number=next(self._numbers))
                self._waiting.setdefault(tenant, {}).setdefault(key, deque()).append(numbered)
                self._all.put(entry)
                if entry.affects_rewards:
                    self._affecting.put(entry)
                self._undone.setdefault(entry.folder, deque()).append(entry.position)
                self._read[entry.folder] = entry.position
                self._count += 1
                self._bytes += len(entry.payload)
                if self._count >= self._most or self._bytes >= self._most_bytes:
                    return False
        for source in sources:
            if source.end is not None:
                self._read[source.folder] = max(source.end, self._read[source.folder])
        return True

    def take(self) -> list[SlotRecord]:
        """The next group: records of the key of the tenant whose turn it is, and of others all that are quickly done.

        They come in the order in which they were read.
        """
        group: list[SlotRecord] = []
        size = 0
        for owner, waiting in self._in_turn():
            most = self._sizes.get(owner, GROUP)
            if group and (most < GROUP or len(group) + len(waiting) > GROUP):
                continue
            count = 0
            while waiting and count < most and len(group) < GROUP and (not group or size < GROUP_BYTES):
                size += len(waiting[0].payload)
                group.append(waiting.popleft())
                count += 1
            self._put_behind(owner)
            if most < GROUP:
                break  # its group is its own
        self._count -= len(group)
        self._bytes -= size
        return sorted(group, key=_place_of)

    def finish(self, group: Sequence[SlotRecord], seconds: float) -> dict[Path, Position]:
        """How far each slot of a group is done now, which took so much work."""
        for owner in {entry.owner for entry in group}:
            size = self._sizes.get(owner, GROUP)
            if seconds > _LONGEST_S:
                self._sizes[owner] = max(_SMALLEST, min(size, len(group)) // 2)
            elif seconds < _LONGEST_S / 4 and owner in self._sizes:
                self._sizes[owner] = 2 * size
                if self._sizes[owner] >= GROUP:
                    del self._sizes[owner]
        for entry in group:
            self._ahead[entry.folder].add(entry.position)
            self._all.take(entry)
            if entry.affects_rewards:
                self._affecting.take(entry)
        return {folder: last for folder in {entry.folder for entry in group} if (last := self._done_up_to(folder))}

    def is_done(
        self, tenant: str, folder: Path, end: Position, key: str | None = None, *, rewards_only: bool = False
    ) -> bool:
        """Whether all of a tenant, or of a key of it, before `end` in a slot is done, or what `affects_rewards`."""
        first = (self._affecting if rewards_only else self._all).first(tenant, folder, key)
        return self._read.get(folder, Position(0, 0)) >= end and (first is None or first > end)

    def _in_turn(self) -> Iterator[tuple[Owner, deque[SlotRecord]]]:
        for tenant, keys in list(self._waiting.items()):
            yield from [(Owner(tenant, key), waiting) for key, waiting in keys.items()]

    def _put_behind(self, owner: Owner) -> None:
        """Let a key go behind the others of its tenant, and that behind the other tenants, unless all of it is done."""
        keys = self._waiting.pop(owner.tenant)
        if waiting := keys.pop(owner.key):
            keys[owner.key] = waiting
        if keys:
            self._waiting[owner.tenant] = keys

    def position(self, source: Source) -> Position:
        """How far a slot has been read."""
        return max(source.mark.position, self._read[source.folder])

    def _done_up_to(self, folder: Path) -> Position | None:
        """The position before which nothing is undone, if that has moved."""
        last, undone, ahead = None, self._undone[folder], self._ahead[folder]
        while undone and undone[0] in ahead:
            last = undone.popleft()
            ahead.discard(last)
        return last


class _Undone:
    """The positions of records that are not done, by tenant, key and slot."""

    def __init__(self) -> None:
        self._positions: dict[str, dict[str, dict[Path, deque[Position]]]] = {}

    def put(self, entry: SlotRecord) -> None:
        """It comes behind all of its key's."""
        of_key = self._positions.setdefault(entry.owner.tenant, {}).setdefault(entry.owner.key, {})
        of_key.setdefault(entry.folder, deque()).append(entry.position)

    def take(self, entry: SlotRecord) -> None:
        """It is the first of its key's in its slot, and is done."""
        tenant, key = entry.owner
        of_tenant = self._positions[tenant]
        of_key = of_tenant[key]
        of_key[entry.folder].popleft()
        if not of_key[entry.folder]:
            del of_key[entry.folder]
        if not of_key:
            del of_tenant[key]
        if not of_tenant:
            del self._positions[tenant]

    def first(self, tenant: str, folder: Path, key: str | None) -> Position | None:
        """The first position in a slot of a tenant's, or of a key's."""
        of_tenant = self._positions.get(tenant, {})
        of_keys = of_tenant.values() if key is None else [of_tenant.get(key, {})]
        return min((of_key[folder][0] for of_key in of_keys if folder in of_key), default=None)


class _Head(msgspec.Struct):
    """What both kinds of records have; msgspec skips the rest."""

    tenant: str
    key: str = ""
    task_id: str | None = None
    run_id: str | None = None


_heads = msgspec.msgpack.Decoder(_Head)


_NOBODYS = _Head("")


def _head_of(payload: bytes) -> _Head:
    try:
        return _heads.decode(payload)
    except msgspec.MsgspecError:  # it is set aside later
        return _NOBODYS


def _is_feedback(payload: bytes) -> bool:
    return _FEEDBACK in payload[:24]


def _place_of(entry: SlotRecord) -> int:
    return entry.number


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
        head = _head_of(payload)
        affects_rewards = _is_feedback(payload) or None not in (head.task_id, head.run_id)
        yield SlotRecord(source.folder, payload, position, Owner(head.tenant, head.key), affects_rewards)
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
    if not _is_feedback(payload):
        return False, 0.0
    try:
        record = decode(payload)
    except msgspec.MsgspecError:  # it is set aside later
        return False, 0.0
    if not isinstance(record, Feedback) or record.stamp is None:
        return False, 0.0
    return record.stamp.order
