"""What every verb of the ledger stands on: one transaction each, errors translated into ours."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar, cast

import psycopg
from psycopg import sql
from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Executable,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    Table,
    Text,
    bindparam,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from tuneloop.shared import steady_time
from tuneloop.shared.errors import Deadlock, LedgerError, LedgerForbidden, LedgerUnavailable, RecordRefused
from tuneloop.shared.ledger.storage.database import first_line
from tuneloop.shared.ledger.storage.database_file import DatabaseFile
from tuneloop.shared.ledger.storage.ledger_clock import LedgerClock
from tuneloop.shared.ledger.storage.schema import Utf8Text

# SQLite takes 32 766 parameters in a statement, PostgreSQL 65 535.
_PARAMETERS = 10_000

#: From so many rows on, PostgreSQL has them copied.
_MANY = 4

#: What PostgreSQL calls the types of the columns.
_COPIED: Mapping[type, str] = {
    String: "text",
    Text: "text",
    Utf8Text: "text",
    Double: "float8",
    SmallInteger: "int2",
    Integer: "int4",
    Boolean: "bool",
    LargeBinary: "bytea",
}

#: A value that can never be stored, which psycopg sorts otherwise.
_TOO_BIG = "54"
#: Read-only, no right to do it, no such table or column or schema, no space, a damaged file: somebody must act.
_FORBIDDEN = (
    *("25006", "42501", "42P01", "42703", "3F000", "53100"),
    *(
        "SQLITE_READONLY",
        "SQLITE_PERM",
        "SQLITE_AUTH",
        "SQLITE_FULL",
        "SQLITE_CORRUPT",
        "SQLITE_NOTADB",
        "SQLITE_ERROR",
    ),
)
_DEADLOCK = "40P01"

#: A constraint that is broken together with another row, which may go.
_OF_OTHER_ROWS = ("23503", "23505", "SQLITE_CONSTRAINT_FOREIGNKEY", "SQLITE_CONSTRAINT_UNIQUE")

#: How often a verb is done again that the database ended, before its caller is told.
_DONE_AGAIN = 4

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Transactions:
    """Reads and writes of one database; the parts of a ledger share one of these."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = steady_time.now) -> None:
        self.engine = engine
        #: The time of now, in seconds since 1970.
        self.clock = self.time if isinstance(clock, LedgerClock) else clock
        self._ledger_clock = clock if isinstance(clock, LedgerClock) else None
        self._writing = engine.execution_options(sqlite_begin="IMMEDIATE")
        of_one_moment = engine.dialect.name == "postgresql"  # SQLite knows nothing else
        self._snapshots = engine.execution_options(isolation_level="REPEATABLE READ") if of_one_moment else engine
        self.file = DatabaseFile(engine)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    def read(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """The rows of a query, with these values for its parameters."""
        self.file.check()
        with translating_errors(), self.engine.connect() as connection:
            return connection.execute(query, values).all()

    def read_together(self, *queries: Executable) -> list[Sequence[Any]]:
        """The answers to several queries, as of one moment."""
        with self.snapshot() as connection:
            return [connection.execute(query).all() for query in queries]

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A transaction that changes nothing, and sees the ledger as of one moment."""
        self.file.check()
        with translating_errors(), self._snapshots.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that changes something, committed at its end."""
        self.file.check()
        self.keep_time()
        with translating_errors(), self._writing.begin() as connection:
            yield connection

    def time(self) -> float:
        """The ledger's time."""
        if self._ledger_clock is None:
            return self.clock()
        with translating_errors():
            return self._ledger_clock()

    def keep_time(self) -> None:
        """Compare the ledger's time with the database's clock, if that was not done lately."""
        if self._ledger_clock is not None:
            with translating_errors():
                self._ledger_clock.compare()

    def clock_skew(self) -> float:
        """By how many seconds the database's clock was ahead of the ledger's time when they were compared last."""
        return 0.0 if self._ledger_clock is None else self._ledger_clock.skew_s

    def boot_time(self) -> float | None:
        """When this machine was started, by the ledger's time; None if the ledger has none of its own."""
        if self._ledger_clock is None:
            return None
        with translating_errors():
            return self._ledger_clock.began


class LedgerPart:
    """Verbs that belong together, each one transaction."""

    def __init__(self, transactions: Transactions) -> None:
        self._read = transactions.read
        self._read_together = transactions.read_together
        self._snapshot = transactions.snapshot
        self._write = transactions.write
        self._clock = transactions.clock
        self._engine = transactions.engine


@contextmanager
def translating_errors() -> Iterator[None]:
    """Raise LedgerUnavailable for what passes by itself or by somebody's hand, RecordRefused for what never will.

    LedgerError itself is what nobody can tell of: a trigger's refusal, a bug.
    """
    try:
        yield
    except PoolExhausted as error:
        raise LedgerUnavailable("all connections to the database are busy") from error
    except DBAPIError as error:
        code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None) or ""
        passes = isinstance(error, (OperationalError, InterfaceError)) or error.connection_invalidated
        kind: type[LedgerError] = LedgerUnavailable if passes else LedgerError
        if code.startswith(_FORBIDDEN):
            kind = LedgerForbidden
        elif code == _DEADLOCK:
            kind = Deadlock
        elif code.startswith(_TOO_BIG) or (
            isinstance(error, (DataError, IntegrityError)) and code not in _OF_OTHER_ROWS
        ):
            kind = RecordRefused
        reason = first_line(error)
        if issubclass(kind, LedgerUnavailable):
            raise kind(reason) from error
        raise kind(f"the database refuses it: {reason}") from None  # its cause would quote the row


def again_after_deadlock(verb: Callable[_P, _T]) -> Callable[_P, _T]:
    """A verb of one transaction that is done again where that was ended by a deadlock, a few times at most."""

    @wraps(verb)
    def patient(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(_DONE_AGAIN):
            with suppress(Deadlock):
                return verb(*args, **kwargs)
        return verb(*args, **kwargs)

    return patient


def alone(connection: Connection, what: str, *, shared: bool = False) -> None:
    """Until this transaction ends, nobody else does `what`; with `shared`, only others who share it do.

    A row lock would not do: who waited for one goes on with what it had read before. SQLite has one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_locking(what, shared))


@cache
def _locking(what: str, shared: bool) -> Executable:
    lock = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
    return select(lock(func.hashtext(func.current_schema()), func.hashtext(what)))


def ignoring(connection: Connection, table: Table) -> Any:
    """An insert that leaves alone what is there already."""
    return _ignoring(connection.dialect.name, table)


@cache
def _ignoring(dialect: str, table: Table) -> Any:
    return (sqlite if dialect == "sqlite" else postgresql).insert(table).on_conflict_do_nothing()


def is_among(column: ColumnElement[Any], values: str) -> ColumnElement[bool]:
    """A condition of a statement that is made once: the column is one of the `values`, which are named there.

    To make a statement takes four times as long as to have SQLite execute it.
    """
    return column.in_(bindparam(values, expanding=True))


def put(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that are not there yet, all with the same columns in the same order.

    SQLAlchemy's own way with parameters costs more than the insert itself.
    """
    if not rows:
        return
    dialect, columns = connection.dialect.name, tuple(rows[0])
    words = tuple(name for name in columns if isinstance(table.c[name].type, Utf8Text))
    values = [
        tuple(Utf8Text.storable(value) if name in words and value is not None else value for name, value in row.items())
        for row in rows
    ]
    if dialect == "postgresql" and len(values) >= _MANY and _copied(connection, table, columns, values):
        return
    connection.exec_driver_sql(_insert(dialect, table, columns), values)


def _copied(connection: Connection, table: Table, columns: tuple[str, ...], values: Sequence[Sequence[object]]) -> bool:
    """Whether all the rows could be copied into the table; none was if some of them is there already.

    Nothing is cheaper on PostgreSQL. What it refuses is tried again as it is usual, and refused with the usual error.
    """
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier(table.name), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    driver = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    savepoint = connection.begin_nested()
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types([_COPIED[type(table.c[name].type)] for name in columns])
            for row in values:
                copy.write_row(row)
    except psycopg.Error:
        savepoint.rollback()
        return False
    savepoint.commit()
    return True


@cache
def _insert(dialect: str, table: Table, columns: tuple[str, ...]) -> str:
    names = ", ".join(f'"{name}"' for name in columns)
    marks = ", ".join(["?" if dialect == "sqlite" else "%s"] * len(columns))
    return f'INSERT INTO "{table.name}" ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING'


def portions(values: Collection[_T], *, of: int = 1) -> Iterator[list[_T]]:
    """The values, each of which takes `of` parameters, in lists short enough for one statement."""
    rest = iter(values)
    while portion := list(islice(rest, _PARAMETERS // of)):
        yield portion
