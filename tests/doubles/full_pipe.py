"""What a log goes to that nobody reads: a stuck collector, a terminal after Ctrl-S."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end to write to of a pipe that is full, and that nobody reads."""
    reading, writing = os.pipe()
    flags = fcntl.fcntl(writing, fcntl.F_GETFL)
    fcntl.fcntl(writing, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\0")
    fcntl.fcntl(writing, fcntl.F_SETFL, flags)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)
