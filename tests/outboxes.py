"""What lies in an explorer's outbox."""

from pathlib import Path

from tuneloop.runner import outbox
from tuneloop.runner.outbox import OutboxReader, names_in
from tuneloop.shared.experience import Exchange, Record, decode


def records_by_file(folder: Path) -> dict[str, list[Record]]:
    """The records of each file, oldest first."""
    found = {}
    for name in names_in(folder):
        reader = OutboxReader(folder / name)
        found[reader.id] = [decode(each.payload) for each in reader.read(0) if isinstance(each, outbox.Record)]
        reader.close()
    return found


def records_in(folder: Path) -> list[Record]:
    """The records of all files."""
    return [record for records in records_by_file(folder).values() for record in records]


def exchanges_in(folder: Path) -> list[Exchange]:
    """The exchanges of all files."""
    return [each for each in records_in(folder) if isinstance(each, Exchange)]
