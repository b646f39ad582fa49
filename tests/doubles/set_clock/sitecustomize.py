"""A process with this folder on its PYTHONPATH has a clock that is wrong, and may be on another machine.

TUNELOOP_TEST_CLOCK is by how many seconds its clock is ahead; TUNELOOP_TEST_BOOT names the start of its machine, which
was a thousand seconds after that of the real one.
"""

import os
import time
from pathlib import Path

_LATER_S = 1000.0

_time, _time_ns, _gettime, _read = time.time, time.time_ns, time.clock_gettime, Path.read_text


def _ahead() -> float:
    """Asked each time: a process that is forked has variables of its own."""
    return float(os.environ.get("TUNELOOP_TEST_CLOCK", "0"))


def _seconds(clock: int) -> float:
    elsewhere = clock == time.CLOCK_BOOTTIME and "TUNELOOP_TEST_BOOT" in os.environ
    return _gettime(clock) - (_LATER_S if elsewhere else 0.0)


def _text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
    boot = os.environ.get("TUNELOOP_TEST_BOOT")
    return f"{boot}\n" if boot is not None and str(path).endswith("/boot_id") else _read(path, encoding, errors)


time.time = lambda: _time() + _ahead()
time.time_ns = lambda: _time_ns() + int(_ahead() * 1e9)
time.clock_gettime = _seconds
Path.read_text = _text  # type: ignore[assignment,method-assign]
