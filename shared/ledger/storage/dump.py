"""A database as one file: SQLite's own copy, or pg_dump's custom format; as of one moment, while services write."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, inspect, select, table, text, update
from sqlalchemy.schema import CreateSchema

from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.ledger.storage import revisions
from tuneloop.shared.ledger.storage.database import connect, translating_errors, upgrade
from tuneloop.shared.ledger.storage.schema import versions
from tuneloop.shared.settings.database_url import parse_url


def dump_name(url: str) -> str:
    """The name of the file that a database is saved as, which names its kind."""
    return "ledger.db" if parse_url(url).get_backend_name() == "sqlite" else "ledger.pg_dump"


class Snapshot:
    def __init__(self, url: str, schema: str, connection: Connection) -> None:
        self._url, self._schema, self._connection = url, schema, connection
        #: The schema's revision; None: the database is of no release.
        self.revision = revisions.of(connection)

    def rows(self, name: str) -> Iterator[Mapping[str, Any]]:
        yield from map(dict, self._connection.execute(select(text("*")).select_from(table(name))).mappings())

    def save(self, target: Path) -> None:
        """Write the database to a file. Raises OSError, or EnvironmentRefused without pg_dump or if it fails."""
        if self._connection.dialect.name == "sqlite":
            try:
                with closing(sqlite3.connect(target)) as copy:
                    cast(sqlite3.Connection, self._connection.connection.driver_connection).backup(copy)
            except sqlite3.Error as error:
                raise OSError(f"{target}: {error}") from None
            return
        moment = self._connection.scalar(text("SELECT pg_export_snapshot()"))
        quoted = self._schema.replace('"', '""')
        _call(
            self._url, "pg_dump", "--format=custom", f"--snapshot={moment}", f'--schema="{quoted}"', f"--file={target}"
        )


@contextmanager
def open_snapshot(url: str, *, schema: str) -> Iterator[Snapshot]:
    """A snapshot of now. Raises LedgerUnavailable if the database is away."""
    engine = connect(url, schema=schema)
    isolated = engine.execution_options(postgresql_begin="REPEATABLE READ")
    try:
        with translating_errors(), isolated.connect() as connection:
            # It holds no lock that others wait for: a slow disk must not end it.
            if engine.dialect.name == "postgresql":
                connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            yield Snapshot(url, schema, connection)
    finally:
        engine.dispose()


def load(url: str, *, schema: str, source: Path, base: Path, folder: Path) -> None:
    """Fill an empty database from such a file, upgrade it, and move its versions. Raises EnvironmentRefused."""
    if revisions.current(url, schema=schema) is None:
        if parse_url(url).get_backend_name() == "sqlite":
            target = Path(str(parse_url(url).database))
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.partial")
            shutil.copyfile(source, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(target)
        else:
            with _transaction(url, schema) as connection:
                if not inspect(connection).has_schema(schema):
                    connection.execute(CreateSchema(schema))
            _call(url, "pg_restore", "--single-transaction", "--no-owner", f"--schema={schema}", str(source))
    upgrade(url, schema=schema)
    with _transaction(url, schema) as connection:
        for version, path in connection.execute(select(versions.c.version, versions.c.path)).all():
            here = str(folder / Path(path).name if version else base)
            connection.execute(update(versions).where(versions.c.version == version).values(path=here))


@contextmanager
def _transaction(url: str, schema: str) -> Iterator[Connection]:
    engine = connect(url, schema=schema)
    try:
        with translating_errors(), engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _call(url: str, program: str, *arguments: str) -> None:
    """Run a client program of PostgreSQL; every user of the machine can read its arguments, so not the password."""
    parsed = parse_url(url)
    secret = parsed.password or parsed.query.get("password")
    there = parsed.set(drivername="postgresql", password=None).difference_update_query(["password"])
    variables = os.environ | ({"PGPASSWORD": str(secret)} if secret else {})
    place = f"--dbname={there.render_as_string(hide_password=False)}"
    try:
        done = subprocess.run(
            [program, place, *arguments], env=variables, stderr=subprocess.PIPE, text=True, check=False
        )
    except FileNotFoundError:
        raise EnvironmentRefused(
            f"{program} is not on the PATH: install PostgreSQL's client programs, of the server's release or newer"
        ) from None
    if done.returncode:
        raise EnvironmentRefused(f"{program} failed: {(done.stderr.strip().splitlines() or ['without a word'])[0]}")
