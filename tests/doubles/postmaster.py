"""A real PostgreSQL server whose processes may be killed: its postmaster is our child, and is started again at once."""

import ctypes
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psycopg

from tests.doubles import postgres

_PR_SET_PDEATHSIG = 1
_READY_S = 60


class Postmaster:
    """A server that syncs to disk, as in production. `close` stops it and deletes its folder."""

    def __init__(self) -> None:
        self._server = postgres.started()
        self._server.stop()
        self._program = self._server.program
        self.url = f"postgresql://postgres@/postgres?host={self._program.folder}"
        self._start()

    def kill(self) -> None:
        """SIGKILL to the postmaster, and a new one."""
        self._process.kill()
        self._process.wait()
        self._start()

    def kill_backend(self, chance: random.Random) -> None:
        """SIGKILL to one that serves a client: the postmaster then ends all others and recovers from the log."""
        deadline = time.monotonic() + _READY_S
        while not (backends := self._backends()):
            assert time.monotonic() < deadline, "nobody is connected"
            time.sleep(0.02)
        os.kill(chance.choice(backends), signal.SIGKILL)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._server.start()
        self._server.close()

    def _start(self) -> None:
        # Until the backends of the one before it have noticed its death, a postmaster refuses to start.
        deadline = time.monotonic() + _READY_S
        self._process = self._started()
        while not self._answers():
            assert time.monotonic() < deadline, self._log.read_text()
            if self._process.poll() is not None:
                self._process = self._started()
            time.sleep(0.05)

    def _started(self) -> "subprocess.Popen[bytes]":
        folder, program, user = self._program
        # syncfs: else each recovery begins with an fsync of every file there is.
        settings = ("fsync=on", "autovacuum=on", "recovery_init_sync_method=syncfs")
        options = ("-D", folder, "-h", "", "-k", folder, *(word for each in settings for word in ("-c", each)))
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [program, *options], stdout=output, stderr=output, user=user, preexec_fn=_stop_with_the_tests
            )

    @property
    def _log(self) -> Path:
        return self._program.folder / "log"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _backends(self) -> list[int]:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in children.split() if b"[local]" in _title(pid)]


def _title(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stop_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
