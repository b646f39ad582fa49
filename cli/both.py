"""This file keeps two services running side by side as child processes, and stops them together."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

#: Seconds that a service gets to stop after the other one failed.
GRACE_S = 120.0

_HEARD = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1


def supervise(commands: Sequence[Sequence[str]]) -> int:
    """Run the commands until all have ended; the exit code is 0, or that of the first that failed.

    SIGTERM and SIGINT are passed on. A service that fails takes the others down; one that ends well does not.
    The children get SIGTERM from the kernel should this process die without a word.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    running = [_start(command) for command in commands]
    told: set[int] = set()
    failed: int | None = None
    deadline: float | None = None
    while running:
        heard = signal.sigtimedwait(_HEARD, 1.0)
        if heard and heard.si_signo != signal.SIGCHLD:
            told.add(heard.si_signo)
            _tell(running, heard.si_signo)
        ended = [child for child in running if child.poll() is not None]
        running = [child for child in running if child not in ended]
        for code in (_exit_code(child.returncode, told) for child in ended):
            if code and failed is None:
                failed, deadline = code, time.monotonic() + GRACE_S
                told.add(signal.SIGTERM)
                _tell(running, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _tell(running, signal.SIGKILL)
    return failed or 0


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that a terminal's Ctrl-C reaches it once: through us."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=_child_setup(os.getpid()))


def _child_setup(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _tell(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        child.send_signal(number)


def _exit_code(returncode: int, told: set[int]) -> int:
    """As a shell gives it; a child that died of the signal we passed on has stopped cleanly."""
    if returncode >= 0:
        return returncode
    return 0 if -returncode in told else 128 - returncode
