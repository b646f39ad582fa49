"""This file keeps two services running side by side as child processes: the end of one is never that of the other."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

#: Seconds that a service gets to stop once neither can start.
GRACE_S = 120.0

#: Seconds before a service is started again: so many at first, twice as many each time, at most so many. One that has
#: run for long begins at the first again.
PAUSE_S, LONGEST_PAUSE_S, LONG_S = 1.0, 60.0, 300.0

#: Codes after which starting again changes nothing: wrong settings, and a trainer that another has taken over from.
_FOR_GOOD = {0, 2, 4}

#: Codes that say that a service refuses to start.
_REFUSED = {2, 3}

#: What a service ends with, for people who wait for it.
_LAST_WORDS = {
    "explorer": "the explorer (replies in flight, 30 s at most)",
    "trainer": "the trainer (its step)",
}

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1


def supervise(commands: Mapping[str, Sequence[str]]) -> int:
    """Run the services, by their names, until all have ended for good; 0, or the code of the first that failed so.

    SIGTERM and SIGINT are passed on. A service that fails is started again, after ever longer pauses, and the others
    go on; one that ends well stays down. Where none gets through its first start, all end. The children get SIGTERM
    from the kernel should this process be killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    supervisor = _Supervisor([_Service(name, command) for name, command in commands.items()])
    return supervisor.run()


@dataclass
class _Service:
    """A service: its process while it runs, else when it is started again (None: never). Times are monotonic.

    `refused`: its first start was refused.
    """

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
        """Start it in a session of its own, so that a terminal's Ctrl-C reaches it once: through us."""
        _prctl()  # looked up here, not between fork and exec
        self.process = subprocess.Popen(
            self.command, start_new_session=True, preexec_fn=partial(_set_up_child, os.getpid())
        )
        self.started_at, self.starts_at = time.monotonic(), None
        self.starts += 1

    def end(self, code: int, *, again: bool) -> None:
        """Take note that it has ended, and when it is started again."""
        self.process = None
        self.refused |= self.starts == 1 and code in _REFUSED
        if not again or code in _FOR_GOOD:
            return
        now = time.monotonic()
        if now - self.started_at > LONG_S:
            self.pause_s = PAUSE_S
        _say(f"the {self.name} has ended with code {code}; it is started again in {self.pause_s:g} s")
        self.starts_at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)


@dataclass
class _Supervisor:
    services: list[_Service]
    forwarded: set[int] = field(default_factory=set)
    first_refusal: int = 0
    failed: int = 0
    deadline: float | None = None

    def run(self) -> int:
        while not all(service.over for service in self.services):
            self._start_what_is_due()
            received = signal.sigtimedwait(_SIGNALS, self._wait_s())
            if received and received.si_signo != signal.SIGCHLD:
                self._stop(received.si_signo)
            self._look_who_has_ended()
            if all(service.refused for service in self.services) and self.deadline is None:
                self.deadline = time.monotonic() + GRACE_S
                self._stop(signal.SIGTERM)
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._send(signal.SIGKILL)
        return self.first_refusal if self.deadline is not None else self.failed

    def _start_what_is_due(self) -> None:
        for service in self.services:
            if service.starts_at is not None and service.starts_at <= time.monotonic():
                service.start()

    def _wait_s(self) -> float:
        due = [service.starts_at - time.monotonic() for service in self.services if service.starts_at is not None]
        return max(0.0, min([1.0, *due]))

    def _stop(self, number: int) -> None:
        """Pass the signal on, and start nothing any more. Who pressed Ctrl-C hears at once what is waited for."""
        if number == signal.SIGINT and number not in self.forwarded:
            _say(f"stopping; waits for {' and '.join(self._waits()) or 'nothing'}")
        self.forwarded.add(number)
        for service in self.services:
            service.starts_at = None
        self._send(number)

    def _waits(self) -> list[str]:
        running = [service.name for service in self.services if service.process is not None]
        return [_LAST_WORDS.get(name, f"the {name}") for name in running]

    def _send(self, number: int) -> None:
        for service in self.services:
            if service.process is not None:
                service.process.send_signal(number)

    def _look_who_has_ended(self) -> None:
        for service in self.services:
            if service.process is not None and service.process.poll() is not None:
                code = _exit_code(service.process.returncode, self.forwarded)
                service.end(code, again=not self.forwarded)
                if service.refused:
                    self.first_refusal = self.first_refusal or code
                if code and service.over:
                    self.failed = self.failed or code
                    if not self.forwarded:
                        _say(f"the {service.name} has ended with code {code}, which starting again does not cure")


def _say(sentence: str) -> None:
    sys.stderr.write(f"tuneloop run: {sentence}\n")
    sys.stderr.flush()


@cache
def _prctl() -> Callable[..., int]:
    return ctypes.CDLL(None, use_errno=True).prctl


def _set_up_child(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _prctl()(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        os._exit(1)


def _exit_code(returncode: int, forwarded: set[int]) -> int:
    """As a shell gives it; a child that died of a signal that we forwarded has stopped cleanly."""
    if returncode >= 0:
        return returncode
    return 0 if -returncode in forwarded else 128 - returncode
