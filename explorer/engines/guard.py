"""Runs one command and ends it, with everything it started, when its owner dies, by whatever death.

    python -m tuneloop.explorer.engines.guard COMMAND [ARGUMENT …]      with a pipe from the owner as standard input

The owner's end of the pipe closes when the owner is gone, even by SIGKILL. The command runs in a process group of its
own. The guard is two processes, because some owners kill their children when they end, as Ray's workers do: the owner's
child only waits for the other, which sees its end as it sees the owner's. Should that other be killed, the kernel kills
the command, but not what the command has started.
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


def _guard(command: list[str], front: int) -> int:
    """Run the command until it, its owner or the process `front` ends; its exit code, as a shell gives it."""
    told_to_end = False

    def _on_term(*_: object) -> None:
        nonlocal told_to_end
        told_to_end = True

    signal.signal(signal.SIGTERM, _on_term)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_the_guard,
    )
    while child.poll() is None and not told_to_end and os.getppid() == front:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], 0.2)
        if readable and not os.read(0, 1):
            break
    _end(child)
    return _as_a_shell(child.wait())


def _as_a_shell(code: int) -> int:
    return code if code >= 0 else 128 - code


def main() -> int:
    """Run the command of argv; returns its exit code, as a shell gives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who then closes the pipe
    # What comes before both processes have said what to do with it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    front = os.getpid()
    guard = os.fork()
    if not guard:
        os.setsid()
        return _guard(sys.argv[1:], front)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(guard, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return _as_a_shell(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))


if __name__ == "__main__":
    sys.exit(main())
