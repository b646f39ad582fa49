"""Time that nobody can set: a step of the machine's clock neither ages anything nor changes an order."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def since_boot() -> float:
    """Seconds since this machine was started, sleep included: the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stamp(NamedTuple):
    """When something was said, whatever any clock says: `seconds` after this `boot` of a machine."""

    boot: str
    seconds: float

    @property
    def order(self) -> tuple[bool, float]:
        """The place among others on this machine: what was said before its last start comes first."""
        return self.boot == boot(), self.seconds


class SteadyClock:
    """Seconds since 1970 by `wall` when it was made, and from then on by `ticks`.

    What a clock was wrong by at the start of a process stays until that knows the ledger's time, and follows it.
    """

    def __init__(self, wall: Callable[[], float] = time.time, ticks: Callable[[], float] = since_boot) -> None:
        self._ticks = ticks
        self._offset = wall() - ticks()

    def __call__(self) -> float:
        """The time of now."""
        return self._offset + self._ticks()

    def follow(self, now: float) -> None:
        """Go on from `now`: somebody knows better."""
        self._offset = now - self._ticks()

    def time_at(self, ticks: float) -> float:
        """The time when the ticks were that many, even if this clock has learnt since what time it is."""
        return self._offset + ticks

    def time_of(self, stamp: Stamp) -> float | None:
        """When it was, by this clock; None if the machine was started since, or it was another machine."""
        return self.time_at(stamp.seconds) if stamp.boot and stamp.boot == boot() else None


#: The time of now, in seconds since 1970, for this process.
now = SteadyClock()


def stamp(*, ago_s: float = 0.0) -> Stamp:
    """The stamp of now, or of a moment so many seconds ago."""
    return Stamp(boot(), since_boot() - ago_s)


@functools.cache
def boot() -> str:
    """This start of the machine; empty where the system does not name it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
