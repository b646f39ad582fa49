"""Time that nobody can set: a step of the machine's clock neither ages anything nor changes an order."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def since_boot() -> float:
    """Seconds since this machine was started, sleep included: the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Seconds since 1970 by `wall` when it was made, and from then on by `ticks`.

    What a clock was wrong by at the start of a process stays until its end, and all the process's times fit together.
    """

    def __init__(self, wall: Callable[[], float] = time.time, ticks: Callable[[], float] = since_boot) -> None:
        self._ticks = ticks
        self._offset = wall() - ticks()

    def __call__(self) -> float:
        """The time of now."""
        return self._offset + self._ticks()


#: The time of now, in seconds since 1970, for this process.
now = SteadyClock()


class Stamp(NamedTuple):
    """When something was said, for the order of what was said on one machine: later on one `boot` is larger."""

    boot: str
    seconds: float


def stamp() -> Stamp:
    """The stamp of now."""
    return Stamp(boot(), since_boot())


@functools.cache
def boot() -> str:
    """This start of the machine; empty where the system does not name it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
