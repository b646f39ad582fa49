"""The tables of TensorZero on PostgreSQL, by the migrations that its wheel's library carries but only its binary runs.

A migration of sqlx lies in the library as a record: a pointer to its SQL, one to the 48 bytes of that SQL's SHA-384,
and its version, which is its date. So they are found, and none is mistaken, by that checksum.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import psycopg
from psycopg import sql

from benchmarks.databases import connect

_RELATIVE = 8  # R_X86_64_RELATIVE
_CHECKSUM_BYTES = 48
_RECORD_BYTES = 96
_MOST_SQL = 1 << 20
_FIRST_VERSION, _LAST_VERSION = 2020_00_00_000000, 2100_00_00_000000

#: Which table lists the migrations of a crate, by what its first one says; of the others, sqlx's own.
_LISTS = {
    b"CREATE TABLE tensorzero_auth_api_key": "tensorzero_auth__sqlx_migrations",
    b"tensorzero.function_configs": "tensorzero_stored_config__sqlx_migrations",
}

_LIST = """
    CREATE TABLE {} (
        version bigint PRIMARY KEY, description text NOT NULL, installed_on timestamptz NOT NULL DEFAULT now(),
        success boolean NOT NULL, checksum bytea NOT NULL, execution_time bigint NOT NULL
    )
"""
_NOTE = "INSERT INTO {} (version, description, success, checksum, execution_time) VALUES (%s, '', true, '', 0)"

# A crate of queues, which recording does not use; its own migrations are not in the library.
_QUEUES = """
    CREATE SCHEMA IF NOT EXISTS durable;
    CREATE FUNCTION durable.create_queue(name text) RETURNS void LANGUAGE sql AS 'SELECT';
"""


class Section(NamedTuple):
    """A part of an ELF file."""

    address: int
    offset: int
    size: int


class Migration(NamedTuple):
    """One step; those of one crate lie side by side."""

    place: int
    version: int
    text: bytes


def migrate(url: str, library: Path) -> None:
    """Make the tables in an empty database, and note each step as done, as the gateway expects it."""
    crates = _crates(_migrations(library.read_bytes()))
    if not crates:
        raise RuntimeError(f"{library} carries no migrations")
    with connect(url) as connection:
        driver: psycopg.Connection[Any] = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
        driver.execute(_QUEUES)
        for crate in crates:
            table = sql.Identifier(_list_of(crate[0].text))
            driver.execute(sql.SQL(_LIST).format(table))
            for step in crate:
                driver.execute(step.text)
                driver.execute(sql.SQL(_NOTE).format(table), (step.version,))


def _crates(steps: Iterable[Migration]) -> list[list[Migration]]:
    crates: list[list[Migration]] = []
    for step in steps:
        if not crates or step.place - crates[-1][-1].place > _RECORD_BYTES:
            crates.append([])
        crates[-1].append(step)
    # The largest makes the schema that another adds to.
    return sorted(crates, key=len, reverse=True)


def _list_of(first: bytes) -> str:
    return next((table for said, table in _LISTS.items() if said in first), "_sqlx_migrations")


def _migrations(library: bytes) -> Iterator[Migration]:
    sections = _sections(library)
    pointers = _pointers(library, sections[".rela.dyn"])

    def offset(address: int) -> int | None:
        for name in (".rodata", ".data.rel.ro"):
            section = sections[name]
            if section.address <= address < section.address + section.size:
                return address - section.address + section.offset
        return None

    def slice_at(slot: int) -> bytes:
        """The bytes of the slice whose pointer and length lie there."""
        place, start = offset(slot), offset(pointers.get(slot, 0))
        if place is None or start is None:
            return b""
        length = struct.unpack_from("<Q", library, place + 8)[0]
        return library[start : start + length] if length < _MOST_SQL else b""

    for slot in sorted(pointers):
        checksum = slice_at(slot)
        if len(checksum) != _CHECKSUM_BYTES:
            continue
        near = range(slot - _RECORD_BYTES, slot + _RECORD_BYTES, 8)
        for text in filter(None, map(slice_at, near)):
            if hashlib.sha384(text).digest() == checksum:
                words = struct.unpack_from(f"<{len(near)}q", library, (offset(slot) or 0) - _RECORD_BYTES)
                *_, version = (word for word in words if _FIRST_VERSION < word < _LAST_VERSION)
                yield Migration(slot, version, text)


def _sections(library: bytes) -> dict[str, Section]:
    table = struct.unpack_from("<Q", library, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    start = headers[names][4]
    return {
        library[start + name : library.index(b"\0", start + name)].decode(): Section(address, offset, length)
        for name, _, _, address, offset, length in headers
    }


def _pointers(library: bytes, relocations: Section) -> dict[int, int]:
    """Where pointers lie, and to where they point."""
    end = relocations.offset + relocations.size
    entries = struct.iter_unpack("<QQq", library[relocations.offset : end])
    return {place: target for place, kind, target in entries if kind & 0xFFFFFFFF == _RELATIVE}
