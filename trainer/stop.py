"""Stops the trainer at a signal, without a lock.

`threading.Event.set` takes a lock that the interrupted main thread may hold in `wait`: a deadlock. Here the handler
sets a flag, and the interpreter writes a byte that ends the wait.
"""

import os
import select
import signal
import socket
from contextlib import suppress
from typing import Protocol


class Stop(Protocol):
    """What a training loop polls; `threading.Event` is one too."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool:
        """Sleep until the timeout or a stop; whether to stop."""

    def set(self) -> None: ...


class SignalStop:
    """Set for good by a signal of `numbers` or by `set`; `answer` is printed at Ctrl-C. For the main thread."""

    def __init__(self, *numbers: signal.Signals, answer: str = "") -> None:
        self._set = False
        self._answer = answer
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        # Written before the handler runs, so that a signal just before the wait ends it too.
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._on_signal)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        if not self._set:
            select.select([self._woken], [], [], timeout)
        return self._set

    def set(self) -> None:
        self._set = True
        with suppress(BlockingIOError):  # then enough bytes are there to end the wait
            self._waking.send(b"\0")

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGINT and not self._set:
            with suppress(OSError):  # the stream is closed
                os.write(2, self._answer.encode())  # not sys.stderr, whose lock may be held
        self._set = True
