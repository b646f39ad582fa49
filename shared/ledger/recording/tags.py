"""The tags that stored completions are found by, stored beside them.

What is read or written here runs inside a transaction of the ledger.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, insert, literal_column

from tuneloop.shared.experience import Exchange
from tuneloop.shared.ledger.recording.completion_object import tags_of
from tuneloop.shared.ledger.storage.schema import changed_metadata, tags
from tuneloop.shared.ledger.storage.transactions import put

#: The endpoint whose exchanges are stored completions. Not a parameter: the partial index would not be used.
ENDPOINT = "/v1/chat/completions"
ENDPOINT_IN_SQL: ColumnElement[str] = literal_column(f"'{ENDPOINT}'")


class PageCursor(NamedTuple):
    """The position of a completion in the list."""

    received_at: float
    msg_id: str


def tag(connection: Connection, exchanges: Sequence[Exchange]) -> None:
    """Let exchanges be found that were not stored before.

    What is stored already has its tags, perhaps of other metadata.
    """
    rows = [
        {"tag": tag, "received_at": each.received_at, "msg_id": each.msg_id}
        for each in exchanges
        if each.endpoint == ENDPOINT
        for tag in tags_of(each.tenant, each.request)
    ]
    put(connection, tags, rows)


def change(connection: Connection, cursor: PageCursor, *, found_by: Collection[bytes], metadata: str) -> None:
    """Give a completion other metadata, and let it be found by that."""
    connection.execute(delete(changed_metadata).where(changed_metadata.c.msg_id == cursor.msg_id))
    connection.execute(insert(changed_metadata).values(msg_id=cursor.msg_id, metadata=metadata))
    connection.execute(delete(tags).where(tags.c.msg_id == cursor.msg_id))
    rows = [{"tag": tag, **cursor._asdict()} for tag in found_by]
    if rows:
        connection.execute(insert(tags), rows)
