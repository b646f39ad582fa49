"""The way to the database: one engine per process, and the schema brought up to date under a lock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.schema import CreateSchema

from tuneloop.shared.errors import DatabaseAway, EnvironmentRefused
from tuneloop.shared.settings.database_url import SETTING, parse_url, without_password

_LOCK_KEY = 0x74756E656C6F6F70  # "tuneloop"; any constant of our own does

# A server that vanished without a word is noticed within a minute, not when TCP gives up after hours.
_POSTGRES_OPTIONS = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "tcp_user_timeout": 60_000,
}

#: Seconds after which the server ends a transaction whose process says nothing: it is dead, cut off or stands still,
#: and others wait for its locks.
SILENCE_S = 8

# The same for a process that does not take what the server sends. On a Unix socket they mean nothing.
_SERVER_SETTINGS = {
    "idle_in_transaction_session_timeout": f"{SILENCE_S}s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": f"{SILENCE_S}s",
}


def connect(url: str, *, schema: str | None = None) -> Engine:
    """An engine for `url`. On PostgreSQL the tables live in the schema named `schema`, made if need be by `upgrade`."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed, connect_args={"timeout": 30.0, "check_same_thread": False}, hide_parameters=True)

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
        server["search_path"] = '"' + schema.replace('"', '""') + '"'
    # One word of libpq's `options` each: a blank ends a word.
    words = [f"-c{name}=" + each.replace("\\", r"\\").replace(" ", r"\ ") for name, each in server.items()]
    options = _POSTGRES_OPTIONS | {"options": " ".join(words)}
    # What a user wrote is a parameter: it must not get into our logs with an error.
    return create_engine(parsed, connect_args=options, pool_pre_ping=True, pool_size=4, hide_parameters=True)


def upgrade(url: str, *, schema: str | None = None, to: str = "head") -> None:
    """Bring the database to the newest schema, or to the revision `to`, or leave it alone if it is there.

    Raises EnvironmentRefused if that fails, DatabaseAway if it may go well later.
    """
    engine = connect(url, schema=schema)
    place = without_password(url)
    try:
        with _only_one(engine):
            config = migrations()
            with engine.begin() as connection:
                # Not IF NOT EXISTS: even that asks for the right to make one, which who made it for us may have kept.
                if engine.dialect.name == "postgresql" and schema and not inspect(connection).has_schema(schema):
                    connection.execute(CreateSchema(schema))
                config.attributes["connection"] = connection
                command.upgrade(config, to)
    except DBAPIError as error:
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


def migrations() -> Config:
    """Where Alembic finds the steps of the schema."""
    config = Config()
    config.set_main_option("script_location", "tuneloop.migrations:")
    return config


@contextmanager
def _only_one(engine: Engine) -> Iterator[None]:
    """Hold the migration lock: several services may start at the same moment."""
    if engine.dialect.name == "sqlite":
        lock = Path(f"{engine.url.database}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        return
    # In no transaction: the server would end one in which nothing is said for as long as a migration takes.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK_KEY})
