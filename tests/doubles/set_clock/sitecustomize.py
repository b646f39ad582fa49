"""A process with this folder on its PYTHONPATH has a clock that is wrong, and may be on another machine.

TUNELOOP_TEST_CLOCK is by how many seconds its clock is ahead; TUNELOOP_TEST_BOOT names the start of its machine, which
was a thousand seconds after that of the real one.
"""

import os
import time
from pathlib import Path

_AHEAD = float(os.environ.get("TUNELOOP_TEST_CLOCK", "0"))
_BOOT = os.environ.get("TUNELOOP_TEST_BOOT")
_LATER_S = 1000.0

_time, _time_ns, _gettime, _read = time.time, time.time_ns, time.clock_gettime, Path.read_text

time.time = lambda: _time() + _AHEAD
time.time_ns = lambda: _time_ns() + int(_AHEAD * 1e9)

if _BOOT is not None:
    _boot = _BOOT

    def _seconds(clock: int) -> float:
        return _gettime(clock) - (_LATER_S if clock == time.CLOCK_BOOTTIME else 0.0)

    def _text(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        return f"{_boot}\n" if str(path).endswith("/boot_id") else _read(path, encoding, errors)

    time.clock_gettime = _seconds
    Path.read_text = _text  # type: ignore[assignment,method-assign]
