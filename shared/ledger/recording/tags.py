"""The tags that stored completions are found by, stored beside them.

What is read or written here runs inside a transaction of the ledger.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, insert, literal_column, select

from tuneloop.shared.experience import Exchange
from tuneloop.shared.ledger.recording.completion_object import tags_of
from tuneloop.shared.ledger.storage.schema import changed_metadata, tags
from tuneloop.shared.ledger.storage.transactions import portions, put

#: The endpoint whose exchanges are stored completions. Not a parameter: the partial index would not be used.
ENDPOINT = "/v1/chat/completions"
ENDPOINT_IN_SQL: ColumnElement[str] = literal_column(f"'{ENDPOINT}'")


class PageCursor(NamedTuple):
    """The position of a completion in the list."""

    received_at: float
    msg_id: str


def tag(connection: Connection, new_exchanges: Sequence[Exchange], *, any_changed: bool) -> None:
    """Let these be found. One whose metadata was changed is found by that already, and may be recorded once more.

    `any_changed`: whether there is one whose metadata was changed at all.
    """
    chats = [each for each in new_exchanges if each.endpoint == ENDPOINT]
    if not chats:
        return
    changed = set(_changed_among(connection, [each.msg_id for each in chats])) if any_changed else set()
    rows = [
        {"tag": tag, "received_at": each.received_at, "msg_id": each.msg_id}
        for each in chats
        if each.msg_id not in changed
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


def _changed_among(connection: Connection, msg_ids: Collection[str]) -> Iterator[str]:
    for portion in portions(msg_ids):
        these = changed_metadata.c.msg_id.in_(portion)
        yield from connection.execute(select(changed_metadata.c.msg_id).where(these)).scalars()
