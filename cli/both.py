"""This file keeps two services running side by side as child processes: the end of one is never that of the other."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: Seconds that a service gets to stop once neither can start.
GRACE_S = 120.0

#: Seconds before a service is started again: so many at first, twice as many each time, at most so many. One that has
#: run for long begins at the first again.
PAUSE_S, LONGEST_PAUSE_S, LONG_S = 1.0, 60.0, 300.0

#: Codes after which starting again changes nothing: wrong settings, and a trainer that another has taken over from.
_FOR_GOOD = {0, 2, 4}

_REFUSED = {2, 3}

_LAST_WORDS = {
    "explorer": "the explorer (replies in flight, 30 s at most)",
    "trainer": "the trainer (its step)",
}

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1


def supervise(commands: Mapping[str, Sequence[str]]) -> int:
    """Run the named services until all end; return 0, or the exit code of the first that failed for good.

    Forwards SIGTERM and SIGINT. A failed service restarts with growing pauses; a clean exit is final. All stop if one
    never passes its first start. The kernel sends SIGTERM to the children if this process is killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    services = [_Service(name, command) for name, command in commands.items()]
    forwarded: set[int] = set()
    first_refusal = failed = 0
    deadline: float | None = None
    while not all(service.over for service in services):
        for service in services:
            if service.starts_at is not None and service.starts_at <= time.monotonic():
                service.start()
        due = [service.starts_at - time.monotonic() for service in services if service.starts_at is not None]
        received = signal.sigtimedwait(_SIGNALS, max(0.0, min([1.0, *due])))
        if received and received.si_signo != signal.SIGCHLD:
            _stop(services, received.si_signo, forwarded)
        for service in services:
            code = service.poll(forwarded)
            if service.refused:
                first_refusal = first_refusal or code
            if service.over:
                failed = failed or code
        if all(service.refused for service in services) and deadline is None:
            deadline = time.monotonic() + GRACE_S
            _stop(services, signal.SIGTERM, forwarded)
        if deadline is not None and time.monotonic() > deadline:
            _stop(services, signal.SIGKILL, forwarded)
    return failed if deadline is None else first_refusal


def service(name: str, config: Path, overrides: Sequence[str]) -> list[str]:
    """The command that starts a service. `-P`: a folder of its name where we are started must not be imported."""
    flags = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-P", "-m", f"tuneloop.{name}", "--config", str(config), *flags]


def start_child(command: Sequence[str], output: IO[bytes] | None = None) -> "subprocess.Popen[bytes]":
    """Start a service in its own session, so that a terminal's Ctrl-C reaches it once, through this process.

    The service gets SIGTERM when this process ends. `output` replaces the inherited standard output and error.
    """
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def set_up() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(command, start_new_session=True, preexec_fn=set_up, stdout=output, stderr=output)


@dataclass
class _Service:
    """A service: its process or, between runs, its next start (None: never). `refused`: the first start failed."""

    name: str
    command: Sequence[str]
    process: "subprocess.Popen[bytes] | None" = None
    starts_at: float | None = 0.0
    started_at: float = 0.0
    starts: int = 0
    pause_s: float = PAUSE_S
    refused: bool = False

    @property
    def over(self) -> bool:
        return self.process is None and self.starts_at is None

    def start(self) -> None:
        self.process = start_child(self.command)
        self.started_at, self.starts_at = time.monotonic(), None
        self.starts += 1

    def poll(self, forwarded: set[int]) -> int:
        """Return the exit code of an end, else 0; restart a failed service. A forwarded signal is no failure."""
        if self.process is None or (code := self.process.poll()) is None:
            return 0
        if code < 0:
            code = 0 if -code in forwarded else 128 - code
        self.process = None
        self.refused |= self.starts == 1 and code in _REFUSED
        if forwarded:
            return code
        now = time.monotonic()
        if now - self.started_at > LONG_S:
            self.pause_s = PAUSE_S
        if code not in _FOR_GOOD:
            _say(f"the {self.name} has ended with code {code}; it is started again in {self.pause_s:g} s")
            self.starts_at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)
        elif code:
            _say(f"the {self.name} has ended with code {code}, which starting again does not cure")
        return code


def _stop(services: Sequence[_Service], number: int, forwarded: set[int]) -> None:
    """Pass the signal on, and start nothing any more. After Ctrl-C it says at once what it waits for."""
    running = [service for service in services if service.process is not None]
    if number == signal.SIGINT and number not in forwarded:
        waits = " and ".join(_LAST_WORDS.get(service.name, f"the {service.name}") for service in running)
        _say(f"stopping; waits for {waits or 'nothing'}")
    forwarded.add(number)
    for service in services:
        service.starts_at = None
        if service.process is not None:
            service.process.send_signal(number)


def _say(sentence: str) -> None:
    sys.stderr.write(f"tuneloop run: {sentence}\n")
    sys.stderr.flush()
