"""The ledger's time: the database's, counted by this machine's ticks between comparisons."""

import time
from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection, Engine, extract, func, select

from tuneloop.shared.experience import since_boot

#: How often a process compares the ledger's time with the database's clock, in seconds.
COMPARE_S = 10.0

#: A clock that is further off, in seconds, was set: a process goes on counting until it is restarted.
FOLLOWED_S = 5.0

#: From so many seconds on an alarm is raised: the order of feedback on two machines is no surer than that.
TOLD_S = 1.0

#: The first comparison is the best of so many: feedback has its place in the order by it.
_FIRST_SAMPLES = 5

CLOCK_SKEW = "clock_skew"


class ClockSkew(NamedTuple):
    """By how many seconds this machine's clock and the database's are ahead of the ledger's time."""

    machine_s: float
    database_s: float

    @property
    def wrong(self) -> bool:
        return max(abs(self.machine_s), abs(self.database_s)) >= TOLD_S

    @property
    def sentence(self) -> str:
        return f"this machine's is {_off(self.machine_s)}, the database's {_off(self.database_s)}"


def _off(seconds: float) -> str:
    if abs(seconds) < TOLD_S:
        return "right"
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"


def database_time(connection: Connection) -> float:
    """What time the database has, in seconds since 1970; SQLite has this machine's."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())


class LedgerClock:
    """Tells the ledger's time, in seconds since 1970. Raises the driver's errors, as any query does."""

    def __init__(
        self,
        engine: Engine,
        *,
        ticks: Callable[[], float] = since_boot,
        database: Callable[[Connection], float] = database_time,
    ) -> None:
        self._engine, self._ticks, self._database = engine, ticks, database
        self._began: float | None = None
        self._unsure_s = 0.0
        self._compare_at = float("-inf")
        #: By how many seconds the database's clock was ahead when it was asked last.
        self.skew_s = 0.0

    def __call__(self) -> float:
        return self.began + self._ticks()

    @property
    def began(self) -> float:
        return self.compare() if self._began is None else self._began

    def compare(self) -> float:
        """Ask the database, if that was not done lately; when this machine was started."""
        if self._began is not None and self._ticks() < self._compare_at:
            return self._began
        with self._engine.connect() as connection:
            samples = [self._sample(connection) for _ in range(_FIRST_SAMPLES if self._began is None else 1)]
        unsure_s, began = min(samples)
        self.skew_s = 0.0 if self._began is None else began - self._began
        # What two round trips explain is no difference: a record keeps its place.
        if self._began is None or unsure_s + self._unsure_s < abs(self.skew_s) <= FOLLOWED_S:
            self._began, self._unsure_s = began, unsure_s
        self._compare_at = self._ticks() + COMPARE_S
        return self._began

    def _sample(self, connection: Connection) -> tuple[float, float]:
        before = self._ticks()
        answer, after = self._database(connection), self._ticks()
        return (after - before) / 2, answer - (before + after) / 2
