"""Databases with our tables in them, made once a process: SQLite's files are copied, PostgreSQL's schemas emptied.

`created` is what `schema.py` says, `migrated` what `upgrade` leaves behind: the same, and Alembic's own table.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import psycopg
from sqlalchemy import Engine, make_url
from sqlalchemy.schema import CreateSchema

from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import metadata

Kind = Literal["created", "migrated"]

#: A schema that has grown beyond is made anew: rows that were deleted keep their place.
_LARGEST = 16 << 20

#: What a test must leave as it was: tables, columns, rules, triggers, rights, and what the planner knows.
_SHAPE = """
    SELECT jsonb_build_array(
        (SELECT nspacl::text FROM pg_namespace WHERE oid = %(schema)s),
        (SELECT jsonb_agg(jsonb_build_array(relname, relkind, relacl::text, reltuples > 0) ORDER BY relname)
         FROM pg_class WHERE relnamespace = %(schema)s),
        (SELECT jsonb_agg(jsonb_build_array(attrelid, attname, atttypid, atttypmod, attnotnull, atthasdef)
                          ORDER BY attrelid, attnum)
         FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid WHERE relnamespace = %(schema)s),
        (SELECT jsonb_agg(oid ORDER BY oid) FROM pg_constraint WHERE connamespace = %(schema)s),
        (SELECT jsonb_agg(pg_trigger.oid ORDER BY pg_trigger.oid)
         FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE relnamespace = %(schema)s),
        (SELECT count(*) FROM pg_proc WHERE pronamespace = %(schema)s)
    )::text
"""
_MIGRATED = "SELECT count(*) FROM pg_class WHERE relnamespace = %(schema)s AND relname = 'alembic_version'"
_SIZE = "SELECT coalesce(sum(pg_relation_size(oid)), 0) FROM pg_class WHERE relnamespace = %(schema)s AND relkind = 'r'"
_SEQUENCES = """
    SELECT setval(pg_class.oid::regclass, seqstart, false) FROM pg_class JOIN pg_sequence ON seqrelid = pg_class.oid
    WHERE relnamespace = %(schema)s
"""


def put_file(url: str, kind: Kind = "created") -> None:
    """Put a database of SQLite's without rows where its URL says, if there is none yet."""
    path = Path(make_url(url).database or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(_file(kind))


def engine_of(url: str, schema: str | None = None) -> Engine:
    """The way to a database that is there, which compiles no statement that another in this process has compiled."""
    engine = database.connect(url, schema=schema)
    first = _FIRST.get(engine.dialect.name)
    if first is None:
        engine.connect().close()  # its dialect gets to know the server
        first = _FIRST[engine.dialect.name] = engine
    engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
    return engine


_FIRST: dict[str, Engine] = {}


@cache
def _file(kind: Kind) -> bytes:
    folder = Path(tempfile.mkdtemp(prefix="tl-sqlite-"))
    try:
        url = f"sqlite:///{folder}/ledger.db"
        _MAKE[kind](url)
        return (folder / "ledger.db").read_bytes()
    finally:
        shutil.rmtree(folder)


def _create(url: str, schema: str | None = None) -> None:
    engine = database.connect(url, schema=schema)
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        metadata.create_all(connection)
    engine.dispose()


def _migrate(url: str, schema: str | None = None) -> None:
    database.upgrade(url, schema=schema)


_MAKE: dict[Kind, Callable[..., None]] = {"created": _create, "migrated": _migrate}


class Schemas:
    """Schemas of one PostgreSQL server. Each test has its own, so that a late write reaches no other test."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._admin: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(
            make_url(url).set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
        )
        self._ready: dict[Kind, tuple[str, str] | None] = {}
        #: How many were made so far.
        self.made = 0

    @contextmanager
    def lent(self, name: str, kind: Kind = "created") -> Iterator[None]:
        """A schema of this name with our tables and no row, until the block ends."""
        ready, shape = self._ready.pop(kind, None) or self._made(kind)
        self._rename(ready, name)
        try:
            yield
        finally:
            if self._emptied(name, shape):
                self._rename(name, ready)
                self._ready[kind] = ready, shape
            else:
                self.drop(name)

    def drop(self, name: str) -> None:
        """Drop a schema with all that is in it, if it is there."""
        self._admin.execute(f"DROP SCHEMA IF EXISTS {_quoted(name)} CASCADE")

    def close(self) -> None:
        self._admin.close()

    def _made(self, kind: Kind) -> tuple[str, str]:
        self.made += 1
        name = f"ready_{kind}_{uuid4().hex}"
        _MAKE[kind](self._url, schema=name)
        return name, self._shape(name)

    def _emptied(self, name: str, shape: str) -> bool:
        """Delete all rows, unless the schema is no longer what it was."""
        if not self._asked("SELECT count(*) FROM pg_namespace WHERE oid = %(schema)s", name):
            return False
        if self._shape(name) != shape or self._asked(_SIZE, name) > _LARGEST:
            return False
        tables = [f"{_quoted(name)}.{_quoted(table.name)}" for table in metadata.sorted_tables]
        with self._admin.transaction():
            # Without the checks of references, which all become true in the end.
            self._admin.execute("SET LOCAL session_replication_role = replica")
            self._admin.execute("; ".join(f"DELETE FROM {table}" for table in tables))
        self._asked(_SEQUENCES, name)
        return True

    def _shape(self, name: str) -> str:
        step = f"SELECT version_num FROM {_quoted(name)}.alembic_version"
        migrated = self._asked(_MIGRATED, name) and self._asked(step, name)
        return f"{migrated} {self._asked(_SHAPE, name)}"

    def _asked(self, query: str, name: str) -> Any:
        found = self._admin.execute("SELECT oid FROM pg_namespace WHERE nspname = %s", [name]).fetchone()
        row = self._admin.execute(query, {"schema": found[0] if found else 0}).fetchone()
        return row and row[0]

    def _rename(self, old: str, new: str) -> None:
        self._admin.execute(f"ALTER SCHEMA {_quoted(old)} RENAME TO {_quoted(new)}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
