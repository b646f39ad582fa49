"""How the trainer is stopped: by a signal, without a lock.

`threading.Event.set` takes a lock that the main thread may hold inside `wait` when the handler interrupts it there: it
would wait for itself. Here the handler sets a flag, and the interpreter itself writes a byte that ends the wait.
"""

import os
import select
import signal
import socket
from contextlib import suppress
from typing import Protocol


class Stop(Protocol):
    """What a training loop asks now and then; `threading.Event` is one too."""

    def is_set(self) -> bool:
        """Whether to stop."""

    def wait(self, timeout: float) -> bool:
        """Sleep for so many seconds, or until asked to stop; whether to stop."""

    def set(self) -> None:
        """Tell it to stop, from another thread."""


class SignalStop:
    """Set by the first of the signals `numbers` or `set`, for good. To be made in the main thread, once a process.

    `answer` is written to the error stream at once when the first is Ctrl-C.
    """

    def __init__(self, *numbers: signal.Signals, answer: str = "") -> None:
        self._set = False
        self._answer = answer
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        # Written to before the handler runs, so that a signal just before the wait is not slept through.
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._on_signal)

    def is_set(self) -> bool:
        """Whether a signal came."""
        return self._set

    def wait(self, timeout: float) -> bool:
        """Sleep for so many seconds, or until a signal comes; whether one did."""
        if not self._set:
            select.select([self._woken], [], [], timeout)
        return self._set

    def set(self) -> None:
        """Stop as a signal would."""
        self._set = True
        with suppress(BlockingIOError):  # then there are bytes enough to end the wait
            self._waking.send(b"\0")

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGINT and not self._set:
            with suppress(OSError):  # its reader is gone
                os.write(2, self._answer.encode())  # past sys.stderr, which may be in the middle of a line, locked
        self._set = True
