"""Runs one command and ends it, with everything it started, when its owner dies, by whatever death.

    python -m explorer.guard COMMAND [ARGUMENT …]      with a pipe from the owner as standard input

The owner's end of the pipe closes when the owner is gone, even by SIGKILL. The command runs in a process group of its
own; should the guard itself be killed, the kernel kills the command.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0

_PR_SET_PDEATHSIG = 1


def _die_with_the_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end(child: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the whole group, and SIGKILL to what is left of it after GRACE_S."""
    for signum, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if not _group_lives(child.pid):
            return
        os.killpg(child.pid, signum)
        deadline = time.monotonic() + wait_s
        while _group_lives(child.pid) and time.monotonic() < deadline:
            child.poll()
            time.sleep(0.05)


def main() -> int:
    """Run the command of argv; returns its exit code, as a shell gives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who then closes the pipe
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_the_guard,
    )
    told_to_end = False

    def _on_term(*_: object) -> None:
        nonlocal told_to_end
        told_to_end = True

    signal.signal(signal.SIGTERM, _on_term)
    while child.poll() is None and not told_to_end:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], 0.2)
        if readable and not os.read(0, 1):
            break
    _end(child)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
