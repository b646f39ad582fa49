"""What commands do with an outbox: look at it, and offer the ledger again what the database refused."""

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.experience import decode
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.recording import RefusedRecord
from tuneloop.shared.outbox_status import OutboxStatus, append_to, files_of, outbox_status
from tuneloop.shared.settings.settings import Settings


class Retried(NamedTuple):
    records: int
    damaged: list[str]


def read_outbox(settings: Settings, ledger: Ledger) -> OutboxStatus:
    """What this machine's outbox holds and the ledger does not have. Raises LedgerError, OSError."""
    recording = ledger.recording
    found = outbox_status(settings.outbox_dir, recording.taken_numbers(files_of(settings.outbox_dir)))
    return found._replace(refused_records=len(recording.refused_records()))


def name_of(refused: RefusedRecord) -> str:
    """The display name of a refused record, constant while the record exists."""
    return hashlib.sha256(f"{refused.file}:{refused.end_offset}".encode()).hexdigest()[:12]


def refused_by_name(ledger: Ledger, names: Collection[str]) -> dict[str, RefusedRecord]:
    """The refused records of these names. Raises TuneloopError where there is one of no record."""
    refused = {name_of(each): each for each in ledger.recording.refused_records()}
    if unknown := sorted(set(names) - set(refused)):
        raise TuneloopError(f"no refused record has the name {', '.join(unknown)}: `tuneloop outbox list` has them all")
    return {name: each for name, each in refused.items() if name in names}


def retry(settings: Settings, ledger: Ledger, refused: dict[str, RefusedRecord]) -> Retried:
    """Append records to the outbox again, and delete their rows; twice does no harm. Raises LedgerError, OSError."""
    records, damaged = 0, []
    for name, each in refused.items():
        payload = ledger.recording.refused_payload(each.file, each.end_offset)
        if payload is None:  # another process was quicker
            continue
        try:
            decode(payload)
        except msgspec.MsgspecError:
            damaged.append(name)
            continue
        append_to(settings.outbox_dir, [payload])
        ledger.recording.delete_refused(each.file, each.end_offset)
        records += 1
    return Retried(records, damaged)
