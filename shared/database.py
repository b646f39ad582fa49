"""The way to the database: one engine per process, and the schema brought up to date under a lock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from shared.errors import EnvironmentRefused, SettingsError

_SETTING = "buffer.trainer_input.experience_buffer.path"
_LOCK_KEY = 0x74756E656C6F6F70  # "tuneloop"; any constant of our own does


def parse_url(url: str) -> URL:
    """The URL with a synchronous driver of ours. Raises SettingsError for what we cannot use."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise SettingsError(
            f"{_SETTING}: not a database URL; write sqlite:////folder/file.db or postgresql://user:password@host/database"
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return parsed.set(drivername="sqlite")
    if backend in {"postgresql", "postgres"}:
        return parsed.set(drivername="postgresql+psycopg")
    raise SettingsError(f"{_SETTING}: {backend} is not supported; use sqlite or postgresql")


def connect(url: str, *, schema: str | None = None) -> Engine:
    """An engine for `url`. On PostgreSQL the tables live in the schema named `schema`, made if need be by `upgrade`."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed, connect_args={"timeout": 30.0, "check_same_thread": False})
        _let_us_begin(engine)
        return engine
    options = {"connect_timeout": 10}
    if schema is not None:
        options |= {"options": f"-csearch_path={_quoted(schema)}"}  # type: ignore[dict-item]
    try:
        return create_engine(parsed, connect_args=options, pool_pre_ping=True, pool_size=4)
    except NoSuchModuleError as error:  # pragma: no cover - psycopg is a dependency
        raise SettingsError(f"{_SETTING}: {error}") from None


def _quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '"'


def _let_us_begin(engine: Engine) -> None:
    """Make SQLite's transactions ours: a writer takes the lock at BEGIN, so it never fails half-way for want of it."""

    @event.listens_for(engine, "connect")
    def _on_connect(connection, _record):  # type: ignore[no-untyped-def]
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'DEFERRED')}")


def upgrade(url: str, *, schema: str | None = None) -> None:
    """Bring the database to the newest schema, or leave it alone if it is. Raises EnvironmentRefused if it cannot be reached."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        try:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentRefused(f"{_SETTING}: cannot make the folder of {parsed.database}: {error.strerror}") from None
    engine = connect(url, schema=schema)
    try:
        with _only_one(engine):
            _run_migrations(engine, schema)
    except DBAPIError as error:
        raise EnvironmentRefused(
            f"{_SETTING}: cannot use the database {parsed.render_as_string()}: {_first_line(error)}; "
            "start it, or correct the URL"
        ) from None
    finally:
        engine.dispose()


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


@contextmanager
def _only_one(engine: Engine) -> Iterator[None]:
    """Hold the migration lock: several services may start at the same moment."""
    if engine.dialect.name == "sqlite":
        with Path(f"{engine.url.database}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        return
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK_KEY})


def _run_migrations(engine: Engine, schema: str | None) -> None:
    config = Config()
    config.set_main_option("script_location", "migrations:")
    with engine.begin() as connection:
        if schema is not None and engine.dialect.name == "postgresql":
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)}"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
