"""The files of clients: their rows. What they hold lies in the job folder, below FILES, under their ids."""

import msgspec
from sqlalchemy import insert, select, update

from tuneloop.shared.ledger.storage.database import LedgerPart
from tuneloop.shared.ledger.storage.job_schema import files

#: The folder of the files, below the job folder.
FILES = "files"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `files`. Times are seconds since 1970."""

    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    sha256: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    deleted_at: float | None = None


class Files(LedgerPart):
    """Keeps, lists and deletes files."""

    def add(self, file: StoredFile) -> None:
        """Keep a file that is on the disk; its `created_at` is the ledger's."""
        row = msgspec.structs.asdict(file) | {"created_at": self._clock()}
        with self._write() as connection:
            connection.execute(insert(files).values(row))

    def find(self, file_id: str, tenant: str | None = None) -> StoredFile | None:
        """That file, of a tenant or, with None, of any; None if there is none, or it was deleted."""
        chosen = select(files).where(files.c.id == file_id, files.c.deleted_at.is_(None))
        rows = self._read(chosen if tenant is None else chosen.where(files.c.tenant == tenant))
        return StoredFile(**rows[0]._mapping) if rows else None

    def delete(self, file_id: str) -> None:
        """Note that it was deleted."""
        with self._write() as connection:
            connection.execute(update(files).where(files.c.id == file_id).values(deleted_at=self._clock()))
