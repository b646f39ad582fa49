"""Notices that a database is older than what was made with it: somebody put back the database alone.

Numbers of versions and epochs only grow, and each is written down beside the checkpoints, too; what the database has
taken from a spool stays there for a while. Where either knows more than the database, that is an older copy.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected, RecordRefused
from tuneloop.shared.experience import Exchange, Feedback, Record, decode
from tuneloop.shared.job_marks import Registered, note_registered, registered_in
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.operations.diagnosis import number
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import flushed_of, keep_segment, payloads_before, slots

#: The alarm while a ledger is older than its checkpoints or its spool.
LEDGER_OLDER = "ledger_older"

#: So many version numbers are left out at least when a ledger was put back.
MIN_SKIPPED = 1000

#: How many of the last replies that the database took from a slot are looked for in it.
_LAST = 20

#: Records that are offered to the database at once.
_GROUP = 200

_CURE = (
    "stop the services, and restore a whole backup (`tuneloop restore`) or go on with it as it is (`tuneloop db adopt`)"
)


class _SlotRecord(NamedTuple):
    slot: Path
    record: Record


class Adoption(NamedTuple):
    """What became of a ledger that was put back by itself: the records of the spool that were offered to it again, how
    many of them it refused, and the number of the next version."""

    offered: int
    refused: int
    next_version: int


def registered_here(job_dir: Path) -> Registered:
    """The newest version and epoch that this folder knows of, by its checkpoints too.

    The newest folder alone may be that of a version which was never registered, so it counts one less.
    """
    seen = registered_in(job_dir)
    version, epoch = seen.version, seen.epoch
    for folder in CheckpointStore(job_dir).folders():
        with suppress(CheckpointRejected):
            manifest = read_manifest(folder)
            version, epoch = max(version, manifest.version - 1), max(epoch, manifest.epoch)
    return Registered(version, epoch)


def find_lost_versions(job_dir: Path, ledger: Ledger) -> str | None:
    """Why the ledger is older than its checkpoints, with what to do; None if it is not."""
    here, known = registered_here(job_dir), ledger.restoration.numbers()
    if here.version <= known.version and here.epoch <= known.epoch:
        return None
    return (
        f"the database is older than {job_dir}: it knows versions up to {known.version} and trainers up to epoch "
        f"{known.epoch}, but version {here.version} and epoch {here.epoch} were registered: {_CURE}"
    )


def find_lost_records(spool_dir: Path, ledger: Ledger) -> str | None:
    """Why the ledger is older than the spool, with what to do; None if it is not, or nothing tells."""
    lost = sum(1 for _slot in _slots_that_know_more(spool_dir, ledger))
    if not lost:
        return None
    return (
        f"the database is older than {spool_dir}: the last replies that it took from {number(lost, 'slot')} are not in"
        f" it, unless they were purged: {_CURE}"
    )


def find_older(settings: Settings, ledger: Ledger) -> list[str]:
    """A sentence for each thing that knows more than the ledger."""
    found = (find_lost_versions(settings.job_dir, ledger), find_lost_records(settings.spool_dir, ledger))
    return [sentence for sentence in found if sentence is not None]


def report_older(settings: Settings, ledger: Ledger) -> list[str]:
    """The same, with an alarm that says so until it is not so any more.

    What a spool still has of it stays there. Raises LedgerUnavailable, OSError.
    """
    found = find_older(settings, ledger)
    for slot in _slots_that_know_more(settings.spool_dir, ledger) if found else ():
        keep_segment(slot, flushed_of(slot).segment)
    if found:
        ledger.alarms.raise_alarm(Alarm(name=LEDGER_OLDER, reason="; ".join(found)))
    else:
        ledger.alarms.clear(LEDGER_OLDER)
    return found


def adopt(settings: Settings, ledger: Ledger) -> Adoption:
    """Go on with a ledger that was put back by itself: offer it what the spool still has, leave numbers out.

    No service may run. What the ledger has is not stored again.
    """
    offered, refused = offer_again(settings.spool_dir, ledger)
    here, known = registered_here(settings.job_dir), ledger.restoration.numbers()
    last = round_up(max(here.version, known.version) + MIN_SKIPPED)
    reason = "the database was put back: versions up to this number may have been published since"
    path = CheckpointStore(settings.job_dir).path(last)
    now = ledger.restoration.begin_anew(version=last, epoch=here.epoch + MIN_SKIPPED, reason=reason, path=path)
    note_registered(settings.job_dir, now.version, now.epoch)
    ledger.alarms.clear(LEDGER_OLDER)
    return Adoption(offered, refused, now.version + 1)


def offer_again(spool_dir: Path, ledger: Ledger) -> tuple[int, int]:
    """Offer the ledger what it had taken, and has not; how many records that were, and how many it refused."""
    offered = refused = 0
    for group in _groups(_in_order(list(_slots_that_know_more(spool_dir, ledger)))):
        offered, refused = offered + len(group), refused + _offer(ledger, group)
    for slot in slots(spool_dir):
        for path in slot.glob("*.kept"):
            path.unlink()
    return offered, refused


def round_up(version: int) -> int:
    """Up to a thousand, so that people see that it is none that was counted to."""
    return -(-version // 1000) * 1000


def _slots_that_know_more(spool_dir: Path, ledger: Ledger) -> Iterator[Path]:
    for slot in slots(spool_dir):
        msg_ids = (record.msg_id for record in _records_before(slot) if isinstance(record, Exchange))
        last = deque(msg_ids, maxlen=_LAST)
        kept = any(slot.glob("*.kept"))  # An explorer that has served since has noticed it.
        if kept or (last and len(ledger.restoration.absent(last)) == len(set(last))):
            yield slot


def _records_before(slot: Path) -> Iterator[Record]:
    for payload in payloads_before(slot, flushed_of(slot)):
        with suppress(msgspec.MsgspecError):
            yield decode(payload)


def _in_order(some_slots: Iterable[Path]) -> Iterator[_SlotRecord]:
    """The records of the slots, each one's in their order, and feedback in that of its stamps: a correction may lie in
    another slot than what it corrects."""
    return (record for _, record in heapq.merge(*map(_with_order, some_slots), key=itemgetter(0)))


def _with_order(slot: Path) -> Iterator[tuple[tuple[bool, float], _SlotRecord]]:
    order = (False, 0.0)
    for record in _records_before(slot):
        if isinstance(record, Feedback) and record.stamp is not None:
            order = max(order, record.stamp.order)
        yield order, _SlotRecord(slot, record)


def _groups(records: Iterator[_SlotRecord]) -> Iterator[list[_SlotRecord]]:
    while group := list(islice(records, _GROUP)):
        yield group


def _offer(ledger: Ledger, group: list[_SlotRecord]) -> int:
    """How many of the records the ledger refused."""
    try:
        ledger.recording.record([each.record for each in group], [each.slot for each in group])
    except (RecordRefused, ValueError):
        if len(group) == 1:
            return 1
        return sum(_offer(ledger, [record]) for record in group)
    return 0
