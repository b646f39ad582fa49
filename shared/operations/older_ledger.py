"""Notices that a database is older than what was made with it: somebody put back the database alone.

Numbers of versions and epochs only grow, and each is written down beside the checkpoints, too; what the database has
taken from a spool stays there for a while. Where either knows more than the database, that is an older copy.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.checkpoints.store import CheckpointStore
from tuneloop.shared.errors import CheckpointRejected, RecordRefused
from tuneloop.shared.experience import Exchange, Feedback, Record, decode
from tuneloop.shared.job_marks import Registered, note_registered, registered_in
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.spool_format import flushed_of, keep_segment, payloads_before, slots

#: The alarm while a ledger is older than its checkpoints or its spool.
LEDGER_OLDER = "ledger_older"

#: So many version numbers are left out at least when a ledger was put back.
MIN_SKIPPED = 1000

#: How many of the last replies that the database took from a slot are looked for in it.
_LAST = 20

_CURE = (
    "stop the services, and restore a whole backup (`tuneloop restore`) or go on with it as it is (`tuneloop db adopt`)"
)


class Adoption(NamedTuple):
    """The records of the spool that were offered to a ledger again, those it refused, and the next version's number."""

    offered: int
    refused: int
    next_version: int


def registered_here(job_dir: Path) -> Registered:
    """The newest version and epoch that this folder knows of, by its checkpoints too.

    The newest folder alone may be that of a version which was never registered, so it counts one less.
    """
    version, epoch = (seen := registered_in(job_dir)).version, seen.epoch
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


def find_older(settings: Settings, ledger: Ledger) -> list[str]:
    """A sentence for each thing that knows more than the ledger: the checkpoints, the spool."""
    found = [lost] if (lost := find_lost_versions(settings.job_dir, ledger)) else []
    if count := len(list(_slots_that_know_more(settings.spool_dir, ledger))):
        found.append(
            f"the database is older than {settings.spool_dir}: the last replies that it took from {count}"
            f" slot{'s' * (count > 1)} are not in it, unless they were purged: {_CURE}"
        )
    return found


def report_older(settings: Settings, ledger: Ledger) -> list[str]:
    """The same, with an alarm that says so until it is not so any more.

    What a spool still has of it stays there. Raises LedgerUnavailable, OSError.
    """
    if found := find_older(settings, ledger):
        for slot in _slots_that_know_more(settings.spool_dir, ledger):
            keep_segment(slot, flushed_of(slot).segment)
        ledger.alarms.raise_alarm(Alarm(name=LEDGER_OLDER, reason="; ".join(found)))
    else:
        ledger.alarms.clear(LEDGER_OLDER)
    return found


def adopt(settings: Settings, ledger: Ledger) -> Adoption:
    """Go on with a ledger that was put back by itself: offer it what the spool still has, leave numbers out.

    No service may run. What the ledger has is not stored again.
    """
    records: list[tuple[tuple[bool, float], Record]] = []
    for slot in _slots_that_know_more(settings.spool_dir, ledger):
        order = (False, 0.0)  # A correction may lie in another slot than what it corrects.
        for record in _records_before(slot):
            if isinstance(record, Feedback) and record.stamp is not None:
                order = max(order, record.stamp.order)
            records.append((order, record))
    refused = 0
    for _, record in sorted(records, key=lambda each: each[0]):
        try:
            ledger.recording.record([record])
        except (RecordRefused, ValueError):
            refused += 1
    for path in settings.spool_dir.glob("*/*.kept"):
        path.unlink()
    here, known = registered_here(settings.job_dir), ledger.restoration.numbers()
    last = round_up(max(here.version, known.version) + MIN_SKIPPED)
    reason = "the database was put back: versions up to this number may have been published since"
    path = CheckpointStore(settings.job_dir).path(last)
    now = ledger.restoration.begin_anew(version=last, epoch=here.epoch + MIN_SKIPPED, reason=reason, path=path)
    note_registered(settings.job_dir, now.version, now.epoch)
    ledger.alarms.clear(LEDGER_OLDER)
    return Adoption(len(records), refused, now.version + 1)


def round_up(version: int) -> int:
    """Up to a thousand, so that people see that it is none that was counted to."""
    return -(-version // 1000) * 1000


def _slots_that_know_more(spool_dir: Path, ledger: Ledger) -> Iterator[Path]:
    for slot in slots(spool_dir):
        last = [record.msg_id for record in _records_before(slot) if isinstance(record, Exchange)][-_LAST:]
        kept = any(slot.glob("*.kept"))  # An explorer that has served since has noticed it.
        if kept or (last and len(ledger.restoration.absent(last)) == len(set(last))):
            yield slot


def _records_before(slot: Path) -> Iterator[Record]:
    for payload in payloads_before(slot, flushed_of(slot)):
        with suppress(msgspec.MsgspecError):
            yield decode(payload)
