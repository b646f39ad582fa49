"""The ledger's time: one for all processes, on all machines, which nobody's setting of a clock changes.

The first process that uses the ledger after its machine was started asks the database what time it is, and writes down
when that start was, by the answer. All others of that machine, and those that come later, count from there with the
seconds since the start, which nobody can set.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, extract, func, insert, select, update

from tuneloop.shared import steady_time
from tuneloop.shared.ledger.storage.schema import clocks

#: How often a process compares the ledger's time with the database's clock, in seconds.
COMPARE_S = 10.0

#: The ledger's time is drawn towards the database's clock by so much of the time that passes: enough for clocks that
#: run differently, and next to nothing where one was set.
PULL = 0.001

#: An answer that took longer says too little of the moment that it is about.
_QUICK_S = 1.0

#: Who has compared its time in so many seconds knows by how much the database's clock is wrong.
_LATELY_S = 6 * COMPARE_S


def database_time(connection: Connection) -> float:
    """What time the database has, in seconds since 1970; SQLite has this machine's."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a process knows of time by itself: which start of the machine this is, and the seconds since then."""

    boot: Callable[[], str] = steady_time.boot
    ticks: Callable[[], float] = steady_time.since_boot
    database: Callable[[Connection], float] = database_time


class LedgerClock:
    """Tells the ledger's time, in seconds since 1970, over an engine whose schema is up to date."""

    def __init__(self, engine: Engine, machine: Machine | None = None) -> None:
        self._engine = engine
        self._machine = machine or Machine()
        self._began: float | None = None
        self._compare_at = float("-inf")
        self._known: dict[str, float] = {}

    def __call__(self) -> float:
        """The time of now. A process that has not written anything yet may have to ask the database.

        Raises the driver's errors, as any query does.
        """
        if self._began is not None:
            return self._began + self._machine.ticks()
        with self._engine.connect() as connection:
            row = self._row(connection)
            if row is None:
                return self._first_time(connection)
            self._began = row.began_at
        return self()

    @property
    def due(self) -> bool:
        """Whether it is time to `compare`."""
        return self._machine.ticks() >= self._compare_at

    def compare(self, connection: Connection) -> None:
        """Take over what time this machine has by the ledger, or say it first; see how far off the database's clock is.

        In a transaction of its own, that nobody else writes to this table.
        """
        row = self._row(connection)
        if row is None:
            began = self._first_time(connection) - self._machine.ticks()
            values = {"boot": self._boot, "began_at": began, "seen_at": began + self._machine.ticks(), "skew": 0.0}
            connection.execute(insert(clocks).values(values))
        else:
            began = self._draw_near(connection, row)
        self._began, self._compare_at = began, self._machine.ticks() + COMPARE_S

    def put_off(self) -> None:
        """Compare later: the database does not let us."""
        self._compare_at = self._machine.ticks() + COMPARE_S

    def starts_of(self, connection: Connection, boots: Collection[str]) -> Mapping[str, float]:
        """When machines were started, by the ledger's time; those that it knows nothing of are left out."""
        missing = set(boots) - self._known.keys() - {self._boot}
        if missing:
            query = select(clocks.c.boot, clocks.c.began_at).where(clocks.c.boot.in_(missing))
            self._known |= {row.boot: row.began_at for row in connection.execute(query)}
        ours = {} if self._began is None else {self._boot: self._began}
        return {boot: began for boot, began in (self._known | ours).items() if boot in boots}

    @property
    def _boot(self) -> str:
        return self._machine.boot()

    def _row(self, connection: Connection) -> Any:
        return connection.execute(select(clocks).where(clocks.c.boot == self._boot)).one_or_none()

    def _draw_near(self, connection: Connection, row: Any) -> float:
        asked_at, database_time, answered_at = (
            self._machine.ticks(),
            self._machine.database(connection),
            self._machine.ticks(),
        )
        before = row.began_at + (asked_at + answered_at) / 2
        skew = database_time - before if answered_at - asked_at <= _QUICK_S else row.skew
        most = PULL * min(max(before - row.seen_at, 0.0), COMPARE_S)
        began: float = row.began_at + min(max(skew, -most), most)
        now = max(began + self._machine.ticks(), row.seen_at)
        seen = {"began_at": began, "seen_at": now, "skew": skew}
        connection.execute(update(clocks).where(clocks.c.boot == self._boot).values(seen))
        return began

    def _first_time(self, connection: Connection) -> float:
        """The time of now where this machine has none yet: the database's, corrected by a machine that knows better.

        It never goes back behind what somebody has seen.
        """
        now = self._machine.database(connection)
        rows = connection.execute(select(clocks).order_by(clocks.c.seen_at.desc())).all()
        for row in rows:
            if abs(now - (row.seen_at + row.skew)) <= _LATELY_S:
                now -= row.skew
                break
        return max(now, max((float(row.seen_at) for row in rows), default=now))
