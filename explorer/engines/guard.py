"""Runs one command and ends it, with everything it started, when its owner dies, however it dies.

    python -m tuneloop.explorer.engines.guard COMMAND [ARGUMENT …]      with a pipe from the owner as standard input

The owner's end of the pipe closes when the owner is gone, even by SIGKILL. The command runs in a process group of its
own. The guard is two processes, because some owners kill their children when they end, as Ray's workers do: the owner's
child only waits for the other, which notices its end as it notices the owner's. Should that other be killed, the kernel
kills the command, but not what the command has started.
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


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end(child: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the whole group, and SIGKILL to what is left of it after GRACE_S."""
    for signum, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if not _group_is_alive(child.pid):
            return
        os.killpg(child.pid, signum)
        deadline = time.monotonic() + wait_s
        while _group_is_alive(child.pid) and time.monotonic() < deadline:
            child.poll()
            time.sleep(0.05)


def _guard(command: list[str], front: int) -> int:
    """Run the command until it, its owner or the process `front` ends; its exit code, as a shell gives it."""
    terminated = False

    def _on_term(*_: object) -> None:
        nonlocal terminated
        terminated = True

    signal.signal(signal.SIGTERM, _on_term)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    while child.poll() is None and not terminated and os.getppid() == front:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], 0.2)
        if readable and not os.read(0, 1):
            break
    _end(child)
    return _shell_exit_code(child.wait())


def _shell_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def main() -> int:
    """Run the command of argv; returns its exit code, as a shell gives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who then closes the pipe
    # Blocked until both processes have their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    front = os.getpid()
    guard = os.fork()
    if not guard:
        os.setsid()
        return _guard(sys.argv[1:], front)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(guard, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return _shell_exit_code(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))


if __name__ == "__main__":
    sys.exit(main())
