"""How many bytes the database holds of each key's: counted with the rows that come and go, so nobody reads them all.

What clients without a key have brought is counted under NO_KEY. Rows that were stored before anything was counted
count for nobody.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    Table,
    bindparam,
    delete,
    func,
    select,
    union_all,
    update,
)

from tuneloop.shared.ledger.storage.key_tables import stored_by_keys
from tuneloop.shared.ledger.storage.schema import exchanges, feedback
from tuneloop.shared.ledger.storage.transactions import ignoring, is_among, portions

#: About what a row takes on disk beside its content: an exchange with its tags, a choice of it, and an event of
#: feedback, each with its indexes.
EXCHANGE_BYTES, CHOICE_BYTES, EVENT_BYTES = 1024, 512, 512

#: In the place of the name of a key, where none was needed. No key has it.
NO_KEY = ""

_ADDING = (
    update(stored_by_keys)
    .where(stored_by_keys.c.tenant == bindparam("its_tenant"), stored_by_keys.c.key == bindparam("its_key"))
    .values(bytes=stored_by_keys.c.bytes + bindparam("more"))
)

#: A tenant and the name of a key of it.
KeyName = tuple[str, str]

_Row = Mapping[str, Any]
_Rows = Sequence[_Row]


def exchange_sizes(rows: _Rows, choices: _Rows) -> list[_Row]:
    """Rows of `exchanges`, with what each takes together with its `choices`."""
    of_choices: Counter[str] = Counter()
    for each in choices:
        content = (each["blob"], each["text"], each["tool_calls"], each["grammar"])
        of_choices[each["msg_id"]] += CHOICE_BYTES + sum(map(_size, content))
    sizes = [EXCHANGE_BYTES + _size(row["request"]) + of_choices[row["msg_id"]] for row in rows]
    return [{**row, "stored_bytes": size} for row, size in zip(rows, sizes, strict=True)]


def event_sizes(rows: _Rows) -> list[_Row]:
    """Rows of `feedback`, with what each takes."""
    return [{**row, "stored_bytes": EVENT_BYTES + _size(row["text"])} for row in rows]


def new_rows(connection: Connection, name: Column[str], rows: _Rows) -> list[_Row]:
    """Those of the rows that are not stored yet, by the column that names them: a spool may be read twice."""
    new = {row[name.name]: row for row in rows}
    for stored in stored_among(connection, name, new):
        del new[stored]
    return list(new.values())


def stored_among(connection: Connection, name: Column[str], names: Collection[str]) -> set[str]:
    """Those of the names that rows have which are stored."""
    return {
        stored
        for portion in portions(names)
        for stored in connection.execute(_stored_names(name), {"names": portion}).scalars()
    }


@cache
def _stored_names(name: Column[str]) -> Select[Any]:
    return select(name).where(is_among(name, "names"))


def count_stored(connection: Connection, rows: _Rows) -> None:
    """Add what new rows take, of exchanges or feedback, to what their keys have."""
    sizes: Counter[KeyName] = Counter()
    for row in rows:
        sizes[row["tenant"], row["key"] or NO_KEY] += row["stored_bytes"]
    _add(connection, sizes)


def delete_counted(connection: Connection, table: Table, *where: ColumnElement[bool]) -> int:
    """Delete rows of exchanges or feedback, which their keys have no more; how many there were.

    Nobody else records, or deletes, until the transaction ends.
    """
    by_key = select(table.c.tenant, table.c.key, func.sum(table.c.stored_bytes)).where(*where, table.c.stored_bytes > 0)
    rows = connection.execute(by_key.group_by(table.c.tenant, table.c.key)).all()
    _add(connection, {(tenant, key or NO_KEY): -size for tenant, key, size in rows})
    return connection.execute(delete(table).where(*where)).rowcount


def _add(connection: Connection, sizes: Mapping[KeyName, int]) -> None:
    # In one order, so that two transactions never wait for each other.
    for tenant, key in sorted(sizes):
        adding = {"its_tenant": tenant, "its_key": key, "more": sizes[tenant, key]}
        if not connection.execute(_ADDING, adding).rowcount:
            connection.execute(ignoring(connection, stored_by_keys), {"tenant": tenant, "key": key, "bytes": 0})
            connection.execute(_ADDING, adding)


def select_miscounted() -> Select[Any]:
    """By how many bytes the rows of a key take more than is counted, where they do: looks at every row."""
    kinds = [
        select(each.c.tenant, func.coalesce(each.c.key, NO_KEY).label("key"), size.label("bytes"))
        .where(each.c.stored_bytes > 0)
        .group_by(each.c.tenant, each.c.key)
        for each, size in ((table, func.sum(table.c.stored_bytes)) for table in (exchanges, feedback))
    ]
    counted = select(stored_by_keys.c.tenant, stored_by_keys.c.key, -stored_by_keys.c.bytes)
    every = union_all(*kinds, counted).subquery()
    difference = func.sum(every.c.bytes)
    query = select(every.c.tenant, every.c.key, difference).group_by(every.c.tenant, every.c.key)
    return query.having(difference != 0).order_by(every.c.tenant, every.c.key)


def _size(content: str | bytes | None) -> int:
    return len(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content or b"")
