"""Starts the ranks of a trainer on this machine, or the process that uses Ray, and restarts them after a failure.

Work of a failed rank is in the last version or still in the ledger, so a restart needs only rank 0's new epoch.
"""

import ctypes
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import structlog

from tuneloop.trainer.rendezvous import environment_of
from tuneloop.trainer.stop import Stop

_log = structlog.get_logger()

#: Seconds before a restart: the first, the most, doubling in between; reset after a run of so many seconds.
_PAUSE_S, _LONGEST_PAUSE_S, _LONG_S = 1.0, 60.0, 300.0

_GRACE_S = 15.0  # seconds for the other ranks to exit once one has; on GPUs they may hang without it
_LOOK_S = 0.5

_FOR_GOOD = {2, 3, 4}  # exit codes that a restart does not change: settings, the machine, a newer trainer
_PR_SET_PDEATHSIG = 1


def launch(command: Sequence[str], size: int, stop: Stop) -> int:
    """Run the command as ranks until they exit for good; the exit code of the cause."""
    pause_s = _PAUSE_S
    while True:
        started = time.monotonic()
        code = _run(command, size, stop)
        if code == 0 or code in _FOR_GOOD or stop.is_set():
            return code
        if time.monotonic() - started > _LONG_S:
            pause_s = _PAUSE_S
        _log.warning("ranks_start_again", code=code, seconds=pause_s)
        if stop.wait(pause_s):
            return 0
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _run(command: Sequence[str], size: int, stop: Stop) -> int:
    """Run the ranks until all have exited, by themselves or because one did."""
    with tempfile.TemporaryDirectory(prefix="tuneloop-ranks-", ignore_cleanup_errors=True) as folder:
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment_of(rank, size, Path(folder) / "rendezvous")},
                preexec_fn=partial(_end_with_parent, os.getpid()) if rank == 0 else None,
            )
            for rank in range(size)
        ]
        _log.info("ranks_started", pids=[rank.pid for rank in ranks])
        try:
            return _watch(ranks, stop)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _watch(ranks: Sequence["subprocess.Popen[bytes]"], stop: Stop) -> int:
    stopping, deadline = False, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if stop.is_set() and not stopping:
            ranks[0].send_signal(signal.SIGTERM)  # rank 0 ends the others
            stopping = True
        if deadline == float("inf") and any(rank.poll() is not None for rank in ranks):
            deadline = time.monotonic() + _GRACE_S
        with ExitStack() as closing:  # wait for an exit, or so long
            running = [os.pidfd_open(rank.pid) for rank in ranks if rank.poll() is None]
            for each in running:
                closing.callback(os.close, each)
            select.select(running, [], [], _LOOK_S)
    codes = [rank.poll() for rank in ranks]
    for number, code in enumerate(codes):
        if code is None:
            _log.warning("rank_hung", rank=number, killed_after_s=_GRACE_S)
        elif code:
            _log.warning("rank_ended", rank=number, code=code)
    if codes[0] == 0 or (stopping and codes[0] == -signal.SIGTERM):  # before its handler was installed
        return 0
    return next((code for code in codes if code in _FOR_GOOD), 1)


def _end_with_parent(parent: int) -> None:
    """Let the kernel stop this process when its parent exits. The other ranks end with rank 0."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with suppress(ProcessLookupError):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
