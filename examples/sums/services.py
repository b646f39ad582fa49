"""Starts the explorer and the trainer as processes of their own, and never leaves one behind."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1
_STOP_S = 60.0
_TAIL = 20


class ServiceFailed(Exception):
    """A service ended unexpectedly; the message shows the end of its log."""


def _stop_with_the_demo() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Service:
    """One `python -m {name} --config …`, in a process group of its own so that Ctrl-C reaches only the demo."""

    def __init__(self, name: str, config: Path, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"tuneloop.{name}", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                process_group=0,
                preexec_fn=_stop_with_the_demo,
            )

    def check(self) -> None:
        """Raise ServiceFailed if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServiceFailed(f"the {self.name} ended with exit code {code}; {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, and where the rest is."""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"its log is {self._log} and ends with:", *(f"    {line}" for line in lines)])

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has stopped; kill it if it takes too long."""
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Services:
    """A block at whose end all services have stopped."""

    def __init__(self, names: tuple[str, ...], *, config: Path, logs: dict[str, Path]) -> None:
        self._names, self._config, self._logs = names, config, logs
        self._running: list[Service] = []

    def __enter__(self) -> "Services":
        try:
            for name in self._names:
                self._running.append(Service(name, self._config, self._logs[name]))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raise ServiceFailed if one has ended."""
        for service in self._running:
            service.check()

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{service.name}: {service.last_words()}" for service in self._running)

    def wait(self) -> None:
        """Wait until all have ended."""
        for service in self._running:
            service.wait()

    def _stop(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C would leave orphans
        try:
            for service in self._running:
                service.ask_to_stop()
            self.wait()
        finally:
            signal.signal(signal.SIGINT, before)
