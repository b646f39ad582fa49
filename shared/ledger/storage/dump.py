"""All rows of a database as plain values: out as of one moment, in again into either kind of database.

The tables are those that the database has, not those of this release: rows of an older schema come out as they are, go
into tables of that schema, and are migrated there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Connection, MetaData, Table, func, insert, inspect, select, text

from tuneloop.shared.ledger.storage.database import connect, upgrade
from tuneloop.shared.ledger.storage.transactions import Transactions, translating_errors

#: Rows that are in memory at once.
PAGE = 500

_ALEMBIC = "alembic_version"

#: A row, its values by the names of their columns: numbers, text, bytes, truth values, None.
Row = Mapping[str, Any]


class Snapshot:
    """The rows of a database as of one moment, for as long as its transaction lasts; services go on meanwhile."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tables = {table.name: table for table in _tables(connection)}
        #: The schema's revision; None: the database is of no release.
        self.revision = MigrationContext.configure(connection).get_current_revision()

    @property
    def tables(self) -> Sequence[str]:
        """The names of the tables; what is referred to comes before what refers to it."""
        return list(self._tables)

    def count(self, table: str) -> int:
        """The number of its rows."""
        return self._connection.scalar(select(func.count()).select_from(self._tables[table])) or 0

    def rows(self, table: str) -> Iterator[Row]:
        """The rows of a table."""
        query = select(self._tables[table]).execution_options(stream_results=True, yield_per=PAGE)
        with self._connection.execute(query) as result:
            columns = [str(column.name) for column in self._tables[table].c]
            for row in result:
                yield dict(zip(columns, row, strict=True))


@contextmanager
def open_snapshot(url: str, *, schema: str) -> Iterator[Snapshot]:
    """A snapshot of now. Raises LedgerUnavailable if the database is away."""
    engine = connect(url, schema=schema)
    is_postgres = engine.dialect.name == "postgresql"
    isolated = engine.execution_options(isolation_level="REPEATABLE READ") if is_postgres else engine
    try:
        with translating_errors(), isolated.connect() as connection:
            if is_postgres:  # It holds no lock that others wait for: a slow disk must not end it.
                connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            yield Snapshot(connection)
    finally:
        engine.dispose()


def count_rows(url: str, *, schema: str) -> dict[str, int]:
    """The rows of each table that has any."""
    with open_snapshot(url, schema=schema) as snapshot:
        counts = {name: snapshot.count(name) for name in snapshot.tables}
    return {name: count for name, count in counts.items() if count}


def drop_tables(url: str, *, schema: str) -> None:
    """Drop every table, ours and Alembic's, so that the database is as new."""
    with _writing(url, schema) as connection:
        for table in reversed(_tables(connection)):
            connection.exec_driver_sql(f'DROP TABLE "{table.name}"')
        connection.exec_driver_sql(f'DROP TABLE IF EXISTS "{_ALEMBIC}"')


def load_rows(url: str, *, schema: str, revision: str, rows: Callable[[str], Iterable[Row]]) -> None:
    """Fill an empty database with the rows of each table, which are of that revision, then bring it to the newest."""
    upgrade(url, schema=schema, to=revision)
    with _writing(url, schema) as connection:
        for table in _tables(connection):
            _fill(connection, table, rows(table.name))
    upgrade(url, schema=schema)


@contextmanager
def _writing(url: str, schema: str) -> Iterator[Connection]:
    transactions = Transactions(connect(url, schema=schema))
    try:
        with transactions.write() as connection:
            yield connection
    finally:
        transactions.close()


def _fill(connection: Connection, table: Table, rows: Iterable[Row]) -> None:
    page: list[Row] = []
    for row in rows:
        page.append(row)
        if len(page) == PAGE:
            connection.execute(insert(table), page)
            page = []
    if page:
        connection.execute(insert(table), page)
    if connection.dialect.name == "postgresql" and "id" in table.c:
        # Let the table number new rows after the newest of these.
        sequence = func.pg_get_serial_sequence(f'"{table.name}"', "id")
        newest = select(func.max(table.c.id)).scalar_subquery()
        connection.execute(select(func.setval(sequence, newest)).where(sequence.is_not(None), newest.is_not(None)))


def _tables(connection: Connection) -> list[Table]:
    """The tables with their columns alone, what is referred to first."""
    inspector, metadata = inspect(connection), MetaData()
    names = [name for name, _ in inspector.get_sorted_table_and_fkc_names() if name not in {None, _ALEMBIC}]
    return [
        Table(name, metadata, *(Column(each["name"], each["type"]) for each in inspector.get_columns(name)))
        for name in names
        if name is not None
    ]
