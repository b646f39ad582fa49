"""Notices that a SQLite file was deleted, moved or replaced: what is written to the one still open would be lost."""

import os
from pathlib import Path

from sqlalchemy import Engine

from tuneloop.shared.errors import LedgerForbidden


class DatabaseFile:
    """The file behind an engine, from its first use on. Of another database there is nothing to notice."""

    def __init__(self, engine: Engine) -> None:
        path = engine.url.database if engine.dialect.name == "sqlite" else None
        self._path = Path(path) if path else None
        self._known: tuple[int, int] | None = None

    def check(self) -> None:
        """Raises LedgerForbidden if the file is not the one it was."""
        if self._path is None:
            return
        present = self._identity(self._path)
        if self._known is None:
            self._known = present
        elif present != self._known:
            raise LedgerForbidden(f"{self._path} was deleted or replaced: put it back, or restart the services")

    @staticmethod
    def _identity(path: Path) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
