"""Reads requests and replies so few at once that little is in memory, however long each is."""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import LargeBinary, Select, func, select

from tuneloop.shared.ledger.recording.stored_completions import first_of_size
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.schema import exchanges, experiences
from tuneloop.shared.ledger.storage.transactions import LedgerPart

#: Bytes of requests and replies that are read for one page, those included of which it shows nothing.
MAX_READ_BYTES = 256 << 20

_PORTION = 250


class ReplyTexts(LedgerPart):
    """What reads the texts of many replies."""

    def _split(self, keys: Sequence[Any]) -> Iterator[list[Any]]:
        """The keys of replies, which have ids, in portions that may be read at once.

        It ends before the last key if that many bytes were read; a portion has one reply at least.
        """
        total = 0
        for begin in range(0, len(keys), _PORTION):
            rest = list(keys[begin : begin + _PORTION])
            sizes = {
                row.id: (codec.text_size(row.head or b"", row.stored) + int(row.reply))
                for row in self._read(_select_sizes([key.id for key in rest]))
            }
            while rest and total < MAX_READ_BYTES:
                some = first_of_size(rest, [sizes.get(key.id, 0) for key in rest])
                total += sum(sizes.get(key.id, 0) for key in some)
                yield some
                rest = rest[len(some) :]
            if rest:
                return


def _select_sizes(ids: Sequence[int]) -> Select[Any]:
    head = func.substr(exchanges.c.request, 1, codec.TEXT_HEAD, type_=LargeBinary).label("head")
    reply = func.length(experiences.c.text) + func.coalesce(func.length(experiences.c.tool_calls), 0)
    columns = experiences.c.id, head, func.length(exchanges.c.request).label("stored"), reply.label("reply")
    query = select(*columns).join_from(experiences, exchanges, exchanges.c.msg_id == experiences.c.msg_id)
    return query.where(experiences.c.id.in_(ids))
