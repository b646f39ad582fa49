"""Opens the database, migrates its schema under a lock, runs one transaction a verb and translates errors.

The ledger's time is the database's clock at a moment, advanced by monotonic seconds.
"""

import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import psycopg
import structlog
from psycopg import sql
from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Dialect,
    Double,
    Engine,
    Executable,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    bindparam,
    create_engine,
    event,
    func,
    inspect,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from sqlalchemy.schema import CreateSchema

from tuneloop.shared.errors import (
    DatabaseAway,
    Deadlock,
    EnvironmentRefused,
    LedgerError,
    LedgerForbidden,
    LedgerUnavailable,
    RecordRefused,
)
from tuneloop.shared.experience import steady_clock
from tuneloop.shared.ledger.storage.clock import LedgerClock
from tuneloop.shared.settings.database_url import SETTING, parse_url, without_password

log = structlog.get_logger()

_LOCK_KEY = 0x74756E656C6F6F70  # "tuneloop"; any constant of our own does

#: Seconds for which an upgrade waits for another one of the same database.
LOCK_S = 300.0

# A server that vanished without a word is noticed within a minute, not after TCP's hours.
_POSTGRES_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "tcp_user_timeout": 60_000,
    "autocommit": True,  # our transactions begin with a message of ours
}

#: Seconds after which the server ends a transaction whose process says nothing: it is dead, cut off or stands still,
#: and others wait for its locks.
SILENCE_S = 8

# The same for a process that does not take what the server sends. On a Unix socket they mean nothing.
_SERVER_SETTINGS = {
    "idle_in_transaction_session_timeout": f"'{SILENCE_S}s'",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": f"'{SILENCE_S}s'",
}


class _SqliteCompiler(SQLiteCompiler):
    def get_from_hint_text(self, table: object, text: str | None) -> str | None:
        return text


def connect(url: str, *, schema: str | None = None) -> Engine:
    """An engine for `url`. On PostgreSQL the tables live in the schema named `schema`, made if need be by `upgrade`."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed, connect_args={"timeout": 30.0, "check_same_thread": False}, hide_parameters=True)
        engine.dialect.statement_compiler = _SqliteCompiler

        # SQLite's transactions are ours: a writer takes the lock at BEGIN, so it never fails half-way for want of it.
        @event.listens_for(engine, "connect")
        def _on_connect(connection, _record):  # type: ignore[no-untyped-def]
            connection.isolation_level = None
            # secure_delete from the first write on: a row that is changed leaves its older bytes behind as well.
            # A page that many transactions change is copied from the log into the file once for all of them.
            larger_steps = "wal_autocheckpoint=4000"
            for pragma in (larger_steps, "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _on_begin(connection: Connection) -> None:
            connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'DEFERRED')}")

        return engine
    server = dict(_SERVER_SETTINGS)
    if schema is not None:
        server["search_path"] = '"' + schema.replace('"', '""').replace("%", "%%") + '"'
    settings = "; ".join(f"SET LOCAL {name} TO {each}" for name, each in server.items())
    options = _POSTGRES_OPTIONS | {"application_name": parsed.query.get("application_name", f"tuneloop {schema or ''}")}
    # What a user wrote is a parameter: it must not get into our logs with an error.
    engine = create_engine(parsed, connect_args=options, pool_pre_ping=True, pool_size=4, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def _on_session(connection: "psycopg.Connection[Any]", _record: object) -> None:
        # A pooler reports another number than the server, and the next session has not what this one has prepared.
        told = connection.execute("SELECT pg_backend_pid()").fetchone()
        if told != (connection.info.backend_pid,):
            connection.prepare_threshold = None

    # All settings are of one transaction: behind a pooler, the next one may have another session, and others this one.
    @event.listens_for(engine, "begin")
    def _on_transaction(connection: Connection) -> None:
        level = connection.get_execution_options().get("postgresql_begin", "READ COMMITTED")
        connection.exec_driver_sql(f"BEGIN ISOLATION LEVEL {level}; {settings}")

    return engine


def upgrade(url: str, *, schema: str | None = None, to: str = "head") -> None:
    """Bring the database to the newest schema, or a revision. Raises EnvironmentRefused, DatabaseAway."""
    from alembic import command
    from alembic.util import CommandError

    engine = connect(url, schema=schema)
    place = without_password(url)
    try:
        with _only_one(engine, place) as connection:
            config = migrations()
            # Not IF NOT EXISTS: even that asks for the right to make one, which who made it for us may have kept.
            if engine.dialect.name == "postgresql" and schema and not inspect(connection).has_schema(schema):
                connection.execute(CreateSchema(schema))
            config.attributes["connection"] = connection
            command.upgrade(config, to)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _LOCK_TIMEOUT:
            raise DatabaseAway(f"{SETTING}: another process has used {place} for {LOCK_S:g} s: try again") from None
        passes = isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated
        raise (DatabaseAway if passes else EnvironmentRefused)(
            f"{SETTING}: cannot use the database {place}: {first_line(error)}; start it, or correct the URL"
        ) from None
    except OSError as error:
        raise EnvironmentRefused(f"{SETTING}: cannot make the file of {place}: {error.strerror}") from None
    except CommandError as error:
        raise EnvironmentRefused(
            f"{SETTING}: the database {place} is not of this release of tuneloop ({error}): install the release that "
            "wrote it, or a newer one"
        ) from None
    finally:
        engine.dispose()


def first_line(error: DBAPIError) -> str:
    """The first line of the database's message; the next ones would quote the row, and with it what a user wrote."""
    return (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]


def migrations() -> Any:
    from alembic.config import Config  # takes as long as all of SQLAlchemy: only who upgrades needs it

    config = Config()
    config.set_main_option("script_location", "tuneloop.migrations:")
    return config


@contextmanager
def _only_one(engine: Engine, place: str) -> Iterator[Connection]:
    """A transaction that holds the migration lock: several services may start at the same moment."""
    if engine.dialect.name == "sqlite":
        lock = Path(f"{engine.url.database}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with engine.begin() as connection:
                yield connection
        return
    with engine.begin() as connection:
        if not connection.scalar(select(func.pg_try_advisory_xact_lock(_LOCK_KEY))):
            log.warning("waits_for_another_upgrade", database=place, at_most_s=LOCK_S)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout TO '{LOCK_S:g}s'")
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK_KEY)))
        yield connection


# SQLite takes 32 766 parameters in a statement, PostgreSQL 65 535.
_PARAMETERS = 10_000

#: From so many rows on, PostgreSQL has them copied.
_MANY = 4

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Utf8Text(TypeDecorator[str]):
    """Text of any origin: what UTF-8 or PostgreSQL cannot hold (NUL, half a surrogate pair) is stored as U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else self.storable(value)

    @staticmethod
    def storable(value: str) -> str:
        return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value)


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
#: Read-only, no right to do it, no such table or column or schema, no space, a damaged file: a person must act.
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
_DEADLOCK, _LOCK_TIMEOUT = "40P01", "55P03"

#: A constraint that is broken together with another row, which may go.
_OF_OTHER_ROWS = ("23503", "23505", "SQLITE_CONSTRAINT_FOREIGNKEY", "SQLITE_CONSTRAINT_UNIQUE")

#: How often a verb that the database ended is done again, before it raises.
_DONE_AGAIN = 4

_T = TypeVar("_T")
_P = ParamSpec("_P")


FileIdentity = tuple[int, int]


class DatabaseFile:
    """Notices that SQLite's file was deleted, moved or replaced since its first use: writes to it would be lost."""

    def __init__(self, engine: Engine) -> None:
        path = engine.url.database if engine.dialect.name == "sqlite" else None
        self._path = Path(path) if path else None
        #: Which file it must be; None until the first use. Another process of the same service may say it before.
        self.identity: FileIdentity | None = None

    def check(self) -> None:
        """Raises LedgerForbidden if the file is not the one it was."""
        if self._path is None:
            return
        wanted = self.identity  # before one looks: another thread may make the file meanwhile, and look first
        present: FileIdentity | None = None
        with suppress(OSError):
            found = os.stat(self._path)
            present = found.st_dev, found.st_ino
        if wanted is None:
            self.identity = self.identity or present
        elif present != wanted:
            raise LedgerForbidden(f"{self._path} was deleted or replaced: put it back, or restart the services")


class Transactions:
    def __init__(self, engine: Engine, *, clock: Callable[[], float] = steady_clock) -> None:
        self.engine = engine
        #: The time of now, in seconds since 1970.
        self.clock = self.time if isinstance(clock, LedgerClock) else clock
        self._ledger_clock = clock if isinstance(clock, LedgerClock) else None
        self._writing = engine.execution_options(sqlite_begin="IMMEDIATE")
        self._snapshots = engine.execution_options(postgresql_begin="REPEATABLE READ")  # SQLite knows nothing else
        self.file = DatabaseFile(engine)

    def close(self) -> None:
        self.engine.dispose()

    def read(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        self.file.check()
        with translating_errors(), self.engine.connect() as connection:
            return connection.execute(query, values).all()

    def read_together(self, *queries: Executable) -> list[Sequence[Any]]:
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
        self.file.check()
        self.keep_time()
        with translating_errors(), self._writing.begin() as connection:
            yield connection

    def time(self) -> float:
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
        return 0.0 if self._ledger_clock is None else self._ledger_clock.skew_s

    def boot_time(self) -> float | None:
        """When this machine was started, by the ledger's time; None if the ledger has none of its own."""
        if self._ledger_clock is None:
            return None
        with translating_errors():
            return self._ledger_clock.began


class LedgerPart:
    def __init__(self, transactions: Transactions) -> None:
        self._read = transactions.read
        self._read_together = transactions.read_together
        self._snapshot = transactions.snapshot
        self._write = transactions.write
        self._clock = transactions.clock
        self._engine = transactions.engine


@contextmanager
def translating_errors() -> Iterator[None]:
    """Raise LedgerUnavailable for what passes, RecordRefused for what never will, LedgerError for an unknown cause."""
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
    """Until this transaction ends, no other session does `what`, or only those that share it. No row lock would do."""
    if connection.dialect.name == "postgresql":
        connection.execute(_locking(what, shared))


#: In the order of the numbers, so that no two who take several wait for each other.
_LOCKING_EACH = text("""
    SELECT CASE WHEN own THEN pg_advisory_xact_lock(hashtext(current_schema() || :what), number)
                ELSE pg_advisory_xact_lock_shared(hashtext(current_schema() || :what), number) END
    FROM unnest(CAST(:numbers AS int[]), CAST(:owns AS bool[])) AS wanted(number, own)
""")


def alone_each(connection: Connection, what: str, numbers: Collection[int], *, shared: Collection[int] = ()) -> None:
    """On PostgreSQL, as `alone` for parts of `what`, by their numbers of 32 bits; `shared` ones are others."""
    if wanted := sorted([*((number, True) for number in numbers), *((number, False) for number in shared)]):
        names = {"what": what, "numbers": [number for number, _ in wanted], "owns": [own for _, own in wanted]}
        connection.execute(_LOCKING_EACH, names)


@cache
def _locking(what: str, shared: bool) -> Executable:
    lock = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
    return select(lock(func.hashtext(func.current_schema()), func.hashtext(what)))


def ignoring(connection: Connection, table: Table) -> Any:
    return _ignoring(connection.dialect.name, table)


@cache
def _ignoring(dialect: str, table: Table) -> Any:
    return (sqlite if dialect == "sqlite" else postgresql).insert(table).on_conflict_do_nothing()


def literally(condition: str) -> ColumnElement[bool]:
    """A condition as it is written: of a comparison with a parameter no planner sees that a partial index applies."""
    return literal_column(condition)


def is_among(column: ColumnElement[Any], values: str) -> ColumnElement[bool]:
    """A condition of a statement that is made once, which costs more than to execute it: named `values`."""
    return column.in_(bindparam(values, expanding=True))


def put(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that are not there yet, of the same columns in the same order; cheaper than SQLAlchemy's way."""
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
    """Whether PostgreSQL copied all rows, which is cheapest; what it refuses is tried again as usual."""
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


def find(
    read: Callable[[Select[Any]], Iterable[Any]],
    query: Select[Any],
    column: ColumnElement[Any],
    values: Collection[Any],
    *,
    of: int = 1,
) -> list[Any]:
    """The rows of a query whose `column` is one of the values, in several statements if the values are many."""
    return [row for some in portions(values, of=of) for row in read(query.where(column.in_(some)))]


def portions(values: Collection[_T], *, of: int = 1) -> Iterator[list[_T]]:
    """The values, each of which takes `of` parameters, in lists short enough for one statement."""
    rest = iter(values)
    while portion := list(islice(rest, _PARAMETERS // of)):
        yield portion
