"""What the ledger knows of the files of outboxes: what was taken of each, and what it refused of them."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, func, select, update

from tuneloop.shared.errors import RecordsLost
from tuneloop.shared.ledger.storage.schema import outbox_files, refused_records
from tuneloop.shared.ledger.storage.transactions import LedgerPart, ignoring, is_among, portions

_NUMBERS = select(outbox_files.c.file, outbox_files.c.number).where(is_among(outbox_files.c.file, "files"))
_LOCKED = _NUMBERS.order_by(outbox_files.c.file).with_for_update()
_MOVING = (
    update(outbox_files)
    .where(outbox_files.c.file == bindparam("its_file"))
    .values(number=bindparam("its_number"), seen_at=bindparam("now"))
)


def move_on(
    connection: Connection, numbers: Mapping[str, int], now: float, *, known: Mapping[str, int]
) -> dict[str, int]:
    """Note that records up to these numbers were taken of the files; returns the numbers up to which they were before.

    Who takes of one of the files meanwhile waits until this transaction ends: each record is taken once. Raises
    RecordsLost where fewer were taken before than are `known` to have been: those between would never come.
    """
    if not numbers:
        return {}
    names = {"files": sorted(numbers)}
    before = {row.file: row.number for row in connection.execute(_LOCKED, names)}
    if len(before) < len(numbers):
        new = [{"file": file, "number": 0, "seen_at": now} for file in names["files"] if file not in before]
        connection.execute(ignoring(connection, outbox_files), new)
        before = {row.file: row.number for row in connection.execute(_LOCKED, names)}
    for file in names["files"]:
        if (had := known.get(file, 0)) > before[file]:
            raise RecordsLost(f"of the file {file} {had} records were taken, and the ledger has {before[file]}")
    moves = [{"its_file": file, "its_number": max(before[file], numbers[file]), "now": now} for file in names["files"]]
    connection.execute(_MOVING, moves)
    return before


class RefusedRecord(NamedTuple):
    """A record that the database refused, without its bytes. A damaged one has the number of the one before it."""

    file: str
    end_offset: int
    number: int
    reason: str
    size: int
    refused_at: float


class OutboxFiles(LedgerPart):
    """Questions about files of outboxes, and the verb that forgets what was refused of them."""

    def refused_records(self) -> list[RefusedRecord]:
        """What was refused, the oldest first."""
        columns = (refused_records.c[name] for name in ("file", "end_offset", "number", "reason"))
        query = select(*columns, func.length(refused_records.c.payload), refused_records.c.refused_at)
        order = (refused_records.c[name] for name in ("refused_at", "file", "end_offset"))
        return [RefusedRecord(*row) for row in self._read(query.order_by(*order))]

    def refused_payload(self, file: str, end_offset: int) -> bytes | None:
        """The bytes of what was refused; None if it is not there."""
        rows = self._read(select(refused_records.c.payload).where(_at(file, end_offset)))
        return bytes(rows[0].payload) if rows else None

    def delete_refused(self, file: str, end_offset: int) -> bool:
        """Forget what was refused; False if it is not there."""
        with self._write() as connection:
            return bool(connection.execute(delete(refused_records).where(_at(file, end_offset))).rowcount)

    def unseen_files(self, present: Collection[str], silent_s: float) -> list[str]:
        """The files that nobody has removed, that are not `present`, and that nothing was taken of for so long."""
        silent = outbox_files.c.removed_at.is_(None), outbox_files.c.seen_at < self._clock() - silent_s
        rows = self._read(select(outbox_files.c.file).where(*silent).order_by(outbox_files.c.file))
        return [row.file for row in rows if row.file not in present]

    def taken_numbers(self, files: Collection[str]) -> dict[str, int]:
        """The highest number of a record that was taken of each of these files, but for unknown ones."""
        found = (row for portion in portions(files) for row in self._read(_NUMBERS, {"files": portion}))
        return {row.file: row.number for row in found}

    def note_removed(self, files: Collection[str]) -> None:
        """Note that these files are gone, as all of them was taken."""
        gone = update(outbox_files).where(is_among(outbox_files.c.file, "files")).values(removed_at=self._clock())
        with self._write() as connection:
            for portion in portions(files):
                connection.execute(gone, {"files": portion})


def _at(file: str, end_offset: int) -> ColumnElement[bool]:
    return and_(refused_records.c.file == file, refused_records.c.end_offset == end_offset)
