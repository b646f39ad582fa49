"""This file keeps two services running side by side as child processes, and stops them together."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

#: Seconds that a service gets to stop after the other one failed.
GRACE_S = 120.0

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1


def supervise(commands: Sequence[Sequence[str]]) -> int:
    """Run the commands until all have ended; the exit code is 0, or that of the first that failed.

    SIGTERM and SIGINT are passed on. A service that fails takes the others down; one that ends well does not.
    The children get SIGTERM from the kernel should this process be killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    running = [_start(command) for command in commands]
    forwarded: set[int] = set()
    failed: int | None = None
    deadline: float | None = None
    while running:
        received = signal.sigtimedwait(_SIGNALS, 1.0)
        if received and received.si_signo != signal.SIGCHLD:
            forwarded.add(received.si_signo)
            _send_signal(running, received.si_signo)
        ended = [child for child in running if child.poll() is not None]
        running = [child for child in running if child not in ended]
        for code in (_exit_code(child.returncode, forwarded) for child in ended):
            if code and failed is None:
                failed, deadline = code, time.monotonic() + GRACE_S
                forwarded.add(signal.SIGTERM)
                _send_signal(running, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _send_signal(running, signal.SIGKILL)
    return failed or 0


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that a terminal's Ctrl-C reaches it once: through us."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=_child_setup(os.getpid()))


def _child_setup(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _send_signal(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        child.send_signal(number)


def _exit_code(returncode: int, forwarded: set[int]) -> int:
    """As a shell gives it; a child that died of a signal that we forwarded has stopped cleanly."""
    if returncode >= 0:
        return returncode
    return 0 if -returncode in forwarded else 128 - returncode
