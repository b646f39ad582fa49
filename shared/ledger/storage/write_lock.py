"""One writer at a time in a SQLite file, and nobody again before the one who is next.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from sqlalchemy import Engine

from tuneloop.shared.errors import LedgerUnavailable

#: As long as SQLite itself waits for a program that is none of ours.
PATIENCE_S = 30.0

#: How long is waited before it is looked again. Who is next looks more often at first: a turn takes a millisecond.
_LOOK_S, _NEXT_LOOK_S = 1e-3, 1e-4


class WriteLock:
    """Of one process; its threads share it."""

    def __init__(self, database: str, *, patience_s: float = PATIENCE_S) -> None:
        self._database = database
        self._patience_s = patience_s
        self._next, self._ours = threading.Lock(), threading.Lock()
        self._files: list[int] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Write inside. Raises LedgerUnavailable if it cannot be had in time."""
        deadline = time.monotonic() + self._patience_s
        self._be_the_thread(deadline)
        try:
            writer = self._be_the_process(deadline)
            try:
                yield
            finally:
                fcntl.flock(writer, fcntl.LOCK_UN)
        finally:
            self._ours.release()

    def _be_the_thread(self, deadline: float) -> None:
        if not self._next.acquire(timeout=self._patience_s):
            raise self._too_late()
        try:
            if not self._ours.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise self._too_late()
        finally:
            self._next.release()

    def _be_the_process(self, deadline: float) -> int:
        try:
            if not self._files:
                self._open()
            following, writer = self._files
            self._lock(following, deadline, _LOOK_S)
            try:
                self._lock(writer, deadline, _NEXT_LOOK_S)
            finally:
                fcntl.flock(following, fcntl.LOCK_UN)
        except OSError as error:
            raise LedgerUnavailable(f"{self._database}.writer: {error.strerror}") from error
        return writer

    def _lock(self, file: int, deadline: float, pause: float) -> None:
        # Not by a call that waits: it would wait for ever for a process that was stopped in the middle of writing.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._too_late() from None
                time.sleep(pause)
                pause = min(1.1 * pause, _LOOK_S)

    def _too_late(self) -> LedgerUnavailable:
        return LedgerUnavailable(f"others have been writing to the database for {self._patience_s:g} s")

    def _open(self) -> None:
        files = []
        for name in ("next", "writer"):
            file = os.open(f"{self._database}.{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, file)
            files.append(file)
        self._files = files


def writing_to(engine: Engine) -> Callable[[], AbstractContextManager[None]]:
    """What to hold while writing through the engine: a turn on SQLite, nothing on what sees to its writers itself."""
    database = engine.url.database
    return WriteLock(database).hold if engine.dialect.name == "sqlite" and database else nullcontext
