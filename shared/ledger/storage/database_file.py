"""Notices that a SQLite file was deleted, moved or replaced: what is written to the one still open would be lost.

To be asked before a connection is made, too: SQLite would make a file where there is none, and take the log of the one
that was moved away for that one's.
"""

import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine

from tuneloop.shared.errors import LedgerForbidden

#: The device and the number of a file on it.
FileIdentity = tuple[int, int]


class DatabaseFile:
    """The file behind an engine, from its first use on. Of another database there is nothing to notice."""

    def __init__(self, engine: Engine) -> None:
        path = engine.url.database if engine.dialect.name == "sqlite" else None
        self._path = Path(path) if path else None
        #: Which file it must be; None until the first use. Another process of the same service may say it before.
        self.identity: FileIdentity | None = None

    def check(self) -> None:
        """Raises LedgerForbidden if the file is not the one it was."""
        if self._path is None:
            return
        wanted = self.identity  # before one looks: another thread may make the file meanwhile, and look first
        present: FileIdentity | None = None
        with suppress(OSError):
            found = os.stat(self._path)
            present = found.st_dev, found.st_ino
        if wanted is None:
            self.identity = self.identity or present
        elif present != wanted:
            raise LedgerForbidden(f"{self._path} was deleted or replaced: put it back, or restart the services")
