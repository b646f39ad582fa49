"""`tuneloop run` as a process beside us: it ends when we do, whatever ends us."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tuneloop.runner.errors import ServiceAway, TuneRefused
from tuneloop.runner.private_files import make_private_folder, private_opener

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None
_STOP_S = 120.0
_TAIL = 20

_MISSING = (
    "tune() starts a service, and the command `tuneloop` is not installed here: install tuneloop beside the app "
    "(`make install` in its repository), or start `tuneloop run --config …` elsewhere and pass service='http://HOST:8010'"
)


class ServiceProcess:
    """A `tuneloop run --config …` in a session of its own, which writes into `log`."""

    def __init__(self, config: Path, log: Path, *, command: list[str] | None = None) -> None:
        self._log = log
        make_private_folder(log.parent, exist_ok=True)
        with open(log, "ab", opener=private_opener) as output:
            self._process = subprocess.Popen(
                [*(command or find_command()), "run", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with(os.getpid()),
            )

    def check(self) -> None:
        """Raise ServiceAway if it has ended."""
        if (code := self._process.poll()) is not None:
            raise ServiceAway(f"the service ended with exit code {code}; {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, and where the rest is."""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"its log is {self._log} and ends with:", *(f"    {line}" for line in lines)])

    def stop(self) -> None:
        """Let it end in peace; kill it if that takes too long."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def find_command() -> list[str]:
    """The command `tuneloop`: of this Python's environment, else in PATH. Raises TuneRefused."""
    if _is_installed("tuneloop.cli.main"):
        return [sys.executable, "-P", "-c", "from tuneloop.cli.main import main; main()"]
    if found := shutil.which("tuneloop"):
        return [found]
    raise TuneRefused(_MISSING)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _end_with(parent: int) -> Callable[[], None] | None:
    """What a child does before it starts, so that the kernel ends it with us; nothing where the kernel is not Linux."""
    return partial(_be_ended_with, parent) if _PRCTL is not None else None


def _be_ended_with(parent: int) -> None:
    assert _PRCTL is not None
    _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        os._exit(1)
