"""The outbox as who does not run it sees it: how much of it the ledger does not have, read from its files."""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from tuneloop.runner.outbox import SUFFIX, Outbox, OutboxReader, names_in
from tuneloop.runner.outbox import Record as OutboxRecord
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import Exchange, decode, time_received

#: Bytes of a file to which commands append: one command, one file.
_FILE_BYTES = 1 << 30


class OutboxStatus(NamedTuple):
    """`records` and `bytes` in `files` that wait for the ledger, the oldest since `since`.

    `refused_records` were refused for their content; `refusal` is why the database refuses others now, if a service
    runs.
    """

    files: int = 0
    records: int = 0
    bytes: int = 0
    since: float | None = None
    refused_records: int = 0
    refusal: str | None = None

    def plus(self, other: "OutboxStatus") -> "OutboxStatus":
        oldest = min((each for each in (self.since, other.since) if each is not None), default=None)
        files, records, size = self.files + other.files, self.records + other.records, self.bytes + other.bytes
        return self._replace(files=files, records=records, bytes=size, since=oldest)


def files_of(folder: Path) -> list[str]:
    """The ids of an outbox's files, oldest first; none where there is no folder. Raises EnvironmentRefused, OSError."""
    try:
        return [name.removesuffix(SUFFIX) for name in names_in(folder)]
    except FileNotFoundError:
        return []
    except PermissionError:
        raise EnvironmentRefused(f"{folder} is its explorer's alone: give the command as the explorer's user") from None


def path_of(folder: Path, file: str) -> Path:
    return folder / f"{file}{SUFFIX}"


def outbox_status(folder: Path, numbers: Mapping[str, int]) -> OutboxStatus:
    """What the ledger, which has these numbers of the files, does not have. Raises OSError."""
    found = OutboxStatus()
    for file in files_of(folder):
        with suppress(FileNotFoundError):  # it was removed just now: the ledger has all of it
            found = found.plus(file_status(path_of(folder, file), numbers.get(file, 0)))
    return found


def file_status(path: Path, taken: int, offset: int = 0) -> OutboxStatus:
    """What follows the record of this number in a file from `offset` on, with damaged bytes. Raises OSError."""
    records = size = damaged = 0
    since: float | None = None
    with closing(OutboxReader(path)) as reader:
        for each in reader.read(offset):
            length, offset = each.end - offset, each.end
            if not isinstance(each, OutboxRecord):
                damaged += length
            elif each.number <= taken:
                damaged = 0  # what is damaged before a record was set aside when the record was taken
            else:
                records, size = records + 1, size + length
                since = recorded_at(each.payload) if since is None else since
    return OutboxStatus(int(size + damaged > 0), records, size + damaged, since)


def held_file(folder: Path) -> Path | None:
    """A file of an explorer that runs; None where all that wrote here have ended."""
    for file in files_of(folder):
        with suppress(FileNotFoundError), closing(OutboxReader(path_of(folder, file))) as reader:
            if not reader.claim():
                return reader.path
    return None


def append_to(folder: Path, payloads: Sequence[bytes]) -> None:
    """Put records into a new file of the outbox. Raises OSError: then none is there."""
    with closing(Outbox(folder, _FILE_BYTES)) as outbox:
        outbox.append(payloads)


def recorded_at(payload: bytes) -> float | None:
    """When a record was written, in seconds since 1970; None for bytes that are no record of this release."""
    try:
        record = decode(payload)
    except msgspec.MsgspecError:
        return None
    return time_received(record) + (record.latency_s if isinstance(record, Exchange) else 0.0)
