"""Makes empty databases of either kind, and measures how large they grow."""

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import BigInteger, Connection, Integer, MetaData, SmallInteger, create_engine, make_url, select, text

from tuneloop.shared.settings.database_url import parse_url

_GROWN = """
    SELECT sum(pg_total_relation_size(oid)) FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""


class Databases(Protocol):
    """One kind of database."""

    name: str

    def fresh(self) -> AbstractContextManager[str]:
        """The URL of a new, empty database, removed afterwards."""
        ...

    def grown(self, url: str) -> int:
        """Bytes of the database on disk, with indexes."""
        ...


class SqliteFiles:
    """Each database a file in one folder."""

    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """The URL of a new file."""
        path = self._folder / f"{next(self._numbers)}.db"
        yield f"sqlite:///{path}"
        for file in self._folder.glob(f"{path.name}*"):
            file.unlink()

    def grown(self, url: str) -> int:
        """The size of the file and its log."""
        with connect(url) as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return Path(str(make_url(url).database)).stat().st_size


class PostgresDatabases:
    """Each database one of its own on the server of `url`, whose user must be allowed to make them."""

    name = "PostgreSQL"

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count(1)

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """The URL of a database made for it."""
        database = f"tuneloop_benchmark_{os.getpid()}_{next(self._numbers)}"
        self._run(f"CREATE DATABASE {database}")
        try:
            # The peer finds its driver by this very prefix.
            yield make_url(self._url).set(drivername="postgresql", database=database).render_as_string(False)
        finally:
            self._run(f"DROP DATABASE {database} WITH (FORCE)")

    def grown(self, url: str) -> int:
        """Bytes of all tables, with indexes and out-of-line storage."""
        with connect(url) as connection:
            return int(connection.execute(text(_GROWN)).scalar_one())

    def _run(self, statement: str) -> None:
        with connect(self._url) as connection:
            connection.exec_driver_sql(statement)


def payload(url: str, tables: tuple[str, ...]) -> int:
    """Bytes of all values: text and bytes by length, numbers by their columns' width."""
    metadata = MetaData()
    with connect(url) as connection:
        metadata.reflect(connection, only=tables)
        return sum(
            _octets(value, column.type)
            for table in metadata.tables.values()
            for row in connection.execute(select(table))
            for value, column in zip(row, table.columns, strict=True)
        )


def _octets(value: object, kind: object) -> int:
    match value:
        case None:
            return 0
        case str():
            return len(value.encode())
        case bytes():
            return len(value)
    if isinstance(kind, SmallInteger):
        return 2
    return 4 if isinstance(kind, Integer) and not isinstance(kind, BigInteger) else 8


@contextmanager
def connect(url: str) -> Iterator[Connection]:
    """A connection outside of any transaction."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    engine = create_engine(parse_url(url), **options)
    with engine.connect() as connection:
        yield connection
    engine.dispose()
