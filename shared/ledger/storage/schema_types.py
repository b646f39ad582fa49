"""What the tables are made of: the names of their rules, and columns that both databases read alike."""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Dialect, Index, Integer, MetaData, Text, TypeDecorator, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in a column declared INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


#: Experiences that correct another one, as an index has them.
CORRECTS = "correction > 0"

#: Experiences that were edited and not rated, as an index has them.
EDITED = "reward IS NULL AND edit_similarity IS NOT NULL"

#: Feedback that raters are compared by, as an index has it.
RATED = "kind IN ('number', 'boolean', 'label') AND msg_id IS NOT NULL"

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Words(TypeDecorator[str]):
    """Text of any origin: what UTF-8 or PostgreSQL cannot hold (NUL, half a surrogate pair) is stored as U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The text as it can be stored and compared."""
        return None if value is None else self.storable(value)

    @staticmethod
    def storable(value: str) -> str:
        """What is stored for this text."""
        return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value)


def one_of(column: str, values: Iterable[StrEnum]) -> str:
    """The rule that a column has one of these values."""
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


def partial(name: str, *columns: ColumnElement[Any], where: str) -> None:
    """An index of some of the rows only. A query uses it only if it says the same, and not by a parameter."""
    Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))
