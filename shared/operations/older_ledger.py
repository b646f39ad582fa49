"""Detects a database that is older than its checkpoints: the database alone was restored.

Version numbers and epochs only grow, and each is also stored beside the checkpoints. Records need no check: the
explorer drains its outbox again into a database that lost them.
"""

from contextlib import suppress
from pathlib import Path

from tuneloop.shared.checkpoints import CheckpointStore, read_manifest
from tuneloop.shared.errors import CheckpointRejected
from tuneloop.shared.job_marks import Registered, note_registered, registered_in
from tuneloop.shared.ledger.ledger import Alarm, Ledger

LEDGER_OLDER = "ledger_older"

#: So many version numbers are left out at least when a ledger was put back.
MIN_SKIPPED = 1000

_CURE = (
    "stop the services, and restore a whole backup (`tuneloop restore`) or go on with it as it is (`tuneloop db adopt`)"
)


def registered_here(job_dir: Path) -> Registered:
    """The newest version and epoch by this folder's marks and checkpoints; its newest folder may be unregistered."""
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


def report_older(job_dir: Path, ledger: Ledger) -> str | None:
    """The same, with an alarm that says so until it is not so any more. Raises LedgerUnavailable, OSError."""
    if (lost := find_lost_versions(job_dir, ledger)) is not None:
        ledger.alarms.raise_alarm(Alarm(name=LEDGER_OLDER, reason=lost))
    else:
        ledger.alarms.clear(LEDGER_OLDER)
    return lost


def adopt(job_dir: Path, ledger: Ledger) -> int:
    """Go on with a ledger that was put back by itself; the number of the next version. No service may run."""
    here, known = registered_here(job_dir), ledger.restoration.numbers()
    last = round_up(max(here.version, known.version) + MIN_SKIPPED)
    reason = "the database was put back: versions up to this number may have been published since"
    path = CheckpointStore(job_dir).path(last)
    now = ledger.restoration.begin_anew(version=last, epoch=here.epoch + MIN_SKIPPED, reason=reason, path=path)
    note_registered(job_dir, now.version, now.epoch)
    ledger.alarms.clear(LEDGER_OLDER)
    return now.version + 1


def round_up(version: int) -> int:
    """Up to a thousand, so that people see that it is none that was counted to."""
    return -(-version // 1000) * 1000
