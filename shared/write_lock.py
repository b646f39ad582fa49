"""One writer at a time in a SQLite file, in the order in which they came.

SQLite has one writer as well, but lets those who wait sleep and try again, up to a tenth of a second at a time: beside
a writer that never rests they may wait for many seconds. Here each waits for two locks (flock): who holds the first is
next, and who has just written must wait for that one like all others.

{database}.next, {database}.writer    the two; empty, and may be deleted while nothing runs
"""

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from sqlalchemy import Engine

from shared.errors import LedgerUnavailable

#: As long as SQLite itself waits for a program that is none of ours.
PATIENCE_S = 30.0


class WriteLock:
    """Of one process; its threads share it."""

    def __init__(self, database: str, *, patience_s: float = PATIENCE_S) -> None:
        self._database = database
        self._patience_s = patience_s
        self._next, self._ours = threading.Lock(), threading.Lock()
        self._files: list[int] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Write inside. Raises LedgerUnavailable if the threads of this process do not get it in time.

        At most one of them waits for other processes, and it does so until they are through or gone.
        """
        self._be_the_thread()
        try:
            writer = self._be_the_process()
            try:
                yield
            finally:
                fcntl.flock(writer, fcntl.LOCK_UN)
        finally:
            self._ours.release()

    def _be_the_thread(self) -> None:
        deadline = time.monotonic() + self._patience_s
        if self._next.acquire(timeout=self._patience_s):
            try:
                if self._ours.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    return
            finally:
                self._next.release()
        raise LedgerUnavailable(f"others have been writing to the database for {self._patience_s:g} s")

    def _be_the_process(self) -> int:
        try:
            if not self._files:
                self._open()
            following, writer = self._files
            fcntl.flock(following, fcntl.LOCK_EX)
            try:
                fcntl.flock(writer, fcntl.LOCK_EX)
            finally:
                fcntl.flock(following, fcntl.LOCK_UN)
        except OSError as error:
            raise LedgerUnavailable(f"{self._database}.writer: {error.strerror}") from error
        return writer

    def _open(self) -> None:
        files = []
        for name in ("next", "writer"):
            file = os.open(f"{self._database}.{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, file)
            files.append(file)
        self._files = files


class NoLock:
    """For a database that sees to its writers itself."""

    def held(self) -> AbstractContextManager[None]:
        """Write inside."""
        return nullcontext()


def write_lock_of(engine: Engine) -> WriteLock | NoLock:
    """What is to be held while writing through the engine."""
    database = engine.url.database
    return WriteLock(database) if engine.dialect.name == "sqlite" and database else NoLock()
