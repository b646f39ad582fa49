"""What every verb of the ledger stands on: one transaction each, ours alone where it must be, errors in our words."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Executable, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from shared.errors import LedgerError, LedgerUnavailable

# SQLite takes 32 766 parameters in a statement, PostgreSQL 65 535.
_PARAMETERS = 10_000

# Two codes of PostgreSQL that psycopg sorts otherwise: a standby cannot write now, a value too big can never be stored.
_READ_ONLY = "25006"
_TOO_BIG = "54"


_T = TypeVar("_T")


class Transactions:
    """A way to the database through which verbs read and write."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._writing = engine.execution_options(sqlite_begin="IMMEDIATE")
        self._clock = clock

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def _read(self, query: Executable) -> Sequence[Any]:
        with translated(), self._engine.connect() as connection:
            return connection.execute(query).all()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with translated(), self._writing.begin() as connection:
            yield connection


@contextmanager
def translated() -> Iterator[None]:
    """Raise LedgerUnavailable for what passes by itself, LedgerError for what the database will refuse again."""
    try:
        yield
    except PoolExhausted as error:
        raise LedgerUnavailable("all connections to the database are busy") from error
    except DBAPIError as error:
        # Only the first line, and no cause: the next ones quote the row, and with it what a user wrote.
        reason = (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]
        if _passes(error):
            raise LedgerUnavailable(reason) from error
        raise LedgerError(f"the database refuses it: {reason}") from None


def _passes(error: DBAPIError) -> bool:
    code = getattr(error.orig, "sqlstate", None) or ""
    if code.startswith(_TOO_BIG):
        return False
    return isinstance(error, (OperationalError, InterfaceError)) or error.connection_invalidated or code == _READ_ONLY


def alone(connection: Connection, what: str, *, shared: bool = False) -> None:
    """Until this transaction ends, nobody else does `what`; with `shared`, only others who share it do.

    A row lock would not do: who waited for one goes on with what it had read before. SQLite has one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        lock = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
        connection.execute(select(lock(func.hashtext(func.current_schema()), func.hashtext(what))))


def ignoring(connection: Connection, table: Table) -> Any:
    """An insert that leaves alone what is there already."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table).on_conflict_do_nothing()


def portions(values: Collection[_T]) -> Iterator[list[_T]]:
    """The values in lists short enough for one statement."""
    rest = iter(values)
    while portion := list(islice(rest, _PARAMETERS)):
        yield portion
