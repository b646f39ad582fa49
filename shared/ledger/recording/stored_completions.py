"""The verbs of stored completions: list, look at, relabel and delete the exchanges of the chat endpoint one by one."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Connection, LargeBinary, Select, and_, exists, func, or_, select, tuple_

from tuneloop.shared.experience import Feedback, State
from tuneloop.shared.ledger.recording.completion_object import StoredChoice, StoredExchange, as_json, tags_of
from tuneloop.shared.ledger.recording.erasures import deleted_of, forget_feedback, mark_deleted, names_in
from tuneloop.shared.ledger.recording.retention import delete_by, delete_with_exchanges, regroup
from tuneloop.shared.ledger.recording.settlement import Settlement
from tuneloop.shared.ledger.recording.tags import ENDPOINT, ENDPOINT_IN_SQL, PageCursor, change
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.schema import changed_metadata, deletions, exchanges, experiences, feedback, tags
from tuneloop.shared.ledger.storage.transactions import LedgerPart, Transactions, alone, portions

Order = Literal["asc", "desc"]

_Key = TypeVar("_Key")

#: Bytes of the requests that one page is made from; one completion is a page whatever it has.
MAX_PAGE_BYTES = 16 << 20

#: Completions that are looked at for one page of those with several tags.
MAX_EXAMINED = 10_000


class CompletionPage(NamedTuple):
    """Some completions of the list, and whether there are more behind them."""

    found: list[StoredExchange]
    more: bool


class Deletion(StrEnum):
    """What became of a deletion."""

    DONE = "done"
    LEASED = "leased"  # the trainer is learning from it: nothing was changed


class StoredCompletions(LedgerPart):
    """Exchanges of the chat endpoint, as OpenAI's clients see them."""

    def __init__(self, transactions: Transactions, settlement: Settlement) -> None:
        super().__init__(transactions)
        self._settlement = settlement

    def cursor_of(self, tenant: str, msg_id: str) -> PageCursor | None:
        """Where a completion stands in the list, or stood until it was deleted."""
        for table in (exchanges, deletions):
            query = select(table.c.received_at).where(table.c.msg_id == msg_id, table.c.tenant == tenant)
            if found := self._read(query):
                return PageCursor(found[0].received_at, msg_id)
        return None

    def page(
        self, tenant: str, *, wanted: Collection[bytes] = (), after: PageCursor | None, order: Order, limit: int
    ) -> CompletionPage | None:
        """The next completions, by the time of their requests: those that have all the `wanted` tags.

        A page may have fewer than `limit` although there are more: it has MAX_PAGE_BYTES at most. None if none of the
        MAX_EXAMINED next completions with the rarest of the tags has the others too, and there are more of them.
        """
        if len(wanted) > 1:
            keys, more = self._with_several(wanted, after, order, limit)
            if more and not keys:
                return None
        else:
            of_one = [select_tagged(tag, after, order, limit + 1) for tag in wanted]
            rows = self._read(of_one[0] if of_one else select_page(tenant, after, order, limit + 1))
            keys, more = [row.msg_id for row in rows[:limit]], len(rows) > limit
        if len(some := self._of_a_page(keys)) < len(keys):
            keys, more = some, True
        found = self._read_stored(tenant, keys)
        return CompletionPage([found[msg_id] for msg_id in keys if msg_id in found], more)

    def get(self, tenant: str, msg_id: str, *, endpoint: str = ENDPOINT) -> StoredExchange | None:
        """One completion; of another endpoint, one exchange."""
        return self._read_stored(tenant, [msg_id], endpoint).get(msg_id)

    def change_metadata(self, tenant: str, msg_id: str, *, pairs: Mapping[str, str]) -> bool:
        """Put `pairs` in the place of a completion's metadata; False if there is no such completion.

        The labels of its experiences stay: those by which training groups are as they were when it was sampled.
        """
        with self._write() as connection:
            alone(connection, "record")
            row = connection.execute(_exchange(tenant, msg_id)).one_or_none()
            if row is not None:
                found_by = tags_of(tenant, codec.unpack_text(row.request), pairs)
                change(connection, PageCursor(row.received_at, msg_id), found_by=found_by, metadata=as_json(pairs))
            return row is not None

    def delete(self, tenant: str, msg_id: str) -> Deletion | None:
        """Delete a completion, its experiences and the feedback about it, unless one is leased. None: it is not there.

        What a version was trained on is counted in its `purged`. Other replies take the rewards that they have without
        this one's feedback. What of it comes in later is not taken any more.
        """
        with self._write() as connection:
            alone(connection, "record")
            exchange = connection.execute(_exchange(tenant, msg_id)).one_or_none()
            if exchange is None:
                return None
            rows = connection.execute(_rows_of([msg_id])).all()
            if any(row.state == State.LEASED for row in rows):
                return Deletion.LEASED
            self._settlement.recompute(connection, _delete_named(connection, [msg_id], rows))
            mark_deleted(connection, [exchange], at=self._clock())
        return Deletion.DONE

    def about_deleted(self, events: Sequence[Feedback]) -> list[str]:
        """The ids of those events that name a deleted completion, and so were not stored."""
        named = {msg_id for event in events for msg_id in names_in(event)}
        deleted = {row.msg_id for portion in portions(named) for row in self._read(deleted_of(portion))}
        return [event.event_id for event in events if deleted & names_in(event)]

    def _of_a_page(self, keys: list[str]) -> list[str]:
        """The first of the completions whose requests are not too long together, and one at least."""
        sizes = {row.msg_id: codec.text_size(row.head or b"", row.size) for row in self._read(_sizes(keys))}
        return first_of_size(keys, [sizes.get(key, 0) for key in keys])

    def _with_several(
        self, wanted: Collection[bytes], after: PageCursor | None, order: Order, limit: int
    ) -> tuple[list[str], bool]:
        [driving, *others] = sorted(wanted, key=self._about_how_many)
        examined = select_tagged(driving, after, order, MAX_EXAMINED).subquery()
        rows = [row.msg_id for row in self._read(_having(others, examined, order).limit(limit + 1))]
        if len(rows) > limit:
            return rows[:limit], True
        [(count,)] = self._read(select(func.count()).select_from(examined))
        return rows, count == MAX_EXAMINED

    def _about_how_many(self, tag: bytes) -> int:
        """How many completions have the tag; those beyond MAX_EXAMINED are not counted."""
        some = select(tags.c.msg_id).where(tags.c.tag == tag).limit(MAX_EXAMINED).subquery()
        return int(self._read(select(func.count()).select_from(some))[0][0])

    def _read_stored(self, tenant: str, msg_ids: Sequence[str], endpoint: str = ENDPOINT) -> dict[str, StoredExchange]:
        # Else what is recorded, or deleted, between the two would be there in part.
        found, sampled = self._read_together(_exchanges(tenant, msg_ids, endpoint), _select_choices(msg_ids))
        choices: dict[str, list[StoredChoice]] = defaultdict(list)
        for row in sampled:
            choices[row.msg_id].append(_choice(row))
        return {row.msg_id: _completion(row, choices[row.msg_id]) for row in found}


def first_of_size(keys: list[_Key], sizes: Sequence[int]) -> list[_Key]:
    """The first of the keys whose `sizes`, in bytes, are together no more than MAX_PAGE_BYTES, and one at least.

    >>> first_of_size(["a", "b", "c"], [1, 2, 20 << 20])
    ['a', 'b']
    """
    for number, total in enumerate(accumulate(sizes)):
        if total > MAX_PAGE_BYTES and number:
            return keys[:number]
    return keys


def select_page(tenant: str, after: PageCursor | None, order: Order, limit: int) -> Select[Any]:
    """The names of a tenant's next completions."""
    query = select(exchanges.c.received_at, exchanges.c.msg_id)
    query = query.where(exchanges.c.tenant == tenant, exchanges.c.endpoint == ENDPOINT_IN_SQL)
    return _next(query, exchanges, after, order).limit(limit)


def select_tagged(tag: bytes, after: PageCursor | None, order: Order, limit: int) -> Select[Any]:
    """The names of the next completions that have the tag."""
    query = select(tags.c.received_at, tags.c.msg_id).where(tags.c.tag == tag)
    return _next(query, tags, after, order).limit(limit)


def _having(others: Sequence[bytes], examined: Any, order: Order) -> Select[Any]:
    """Those of the completions that have the other tags too."""
    query = _next(select(examined.c.msg_id), examined, None, order)
    for tag in others:
        same = and_(*(tags.c[name] == examined.c[name] for name in PageCursor._fields))
        query = query.where(exists().where(tags.c.tag == tag, same))
    return query


def _next(query: Select[Any], table: Any, after: PageCursor | None, order: Order) -> Select[Any]:
    columns = [table.c[name] for name in PageCursor._fields]
    if after is not None:
        key = tuple_(*columns)
        query = query.where(key > after if order == "asc" else key < after)
    return query.order_by(*(column.asc() if order == "asc" else column.desc() for column in columns))


def _sizes(msg_ids: Sequence[str]) -> Select[Any]:
    head = func.substr(exchanges.c.request, 1, codec.TEXT_HEAD, type_=LargeBinary).label("head")
    size = func.length(exchanges.c.request).label("size")
    return select(exchanges.c.msg_id, head, size).where(exchanges.c.msg_id.in_(msg_ids))


def _exchanges(tenant: str, msg_ids: Sequence[str], endpoint: str) -> Select[Any]:
    ours = and_(exchanges.c.tenant == tenant, exchanges.c.endpoint == endpoint, exchanges.c.msg_id.in_(msg_ids))
    columns = exchanges.c.msg_id, exchanges.c.received_at, exchanges.c.request, changed_metadata.c.metadata
    changed = changed_metadata.c.msg_id == exchanges.c.msg_id
    return select(*columns).outerjoin_from(exchanges, changed_metadata, changed).where(ours)


def _select_choices(msg_ids: Sequence[str]) -> Select[Any]:
    names = ("msg_id", "choice", "text", "tool_calls", "finish_reason", "completion_tokens", "temperature")
    # Of the blob only how many prompt ids it has: shared/ledger/storage/codec.py.
    prompt = func.substr(experiences.c.blob, 1, 4, type_=LargeBinary).label("prompt")
    query = select(*(experiences.c[name] for name in names), prompt)
    sampled = and_(experiences.c.msg_id.in_(msg_ids), experiences.c.correction == 0)
    return query.where(sampled).order_by(experiences.c.choice)


def _choice(row: Any) -> StoredChoice:
    return StoredChoice(
        choice=row.choice,
        text=row.text,
        tool_calls=row.tool_calls,
        finish_reason=row.finish_reason,
        prompt_tokens=int.from_bytes(row.prompt, "little"),
        completion_tokens=row.completion_tokens,
        temperature=row.temperature,
    )


def _completion(row: Any, choices: Sequence[StoredChoice]) -> StoredExchange:
    return StoredExchange(
        msg_id=row.msg_id,
        received_at=row.received_at,
        request=codec.unpack_text(row.request),
        metadata=row.metadata,
        choices=tuple(choices),
    )


def _exchange(tenant: str, msg_id: str) -> Select[Any]:
    ours = and_(exchanges.c.tenant == tenant, exchanges.c.endpoint == ENDPOINT, exchanges.c.msg_id == msg_id)
    names = ("msg_id", "tenant", "received_at", "request")
    return select(*(exchanges.c[name] for name in names)).where(ours).with_for_update()


def _rows_of(msg_ids: Collection[str]) -> Select[Any]:
    names = ("id", "msg_id", "tenant", "task_id", "run_id", "group_id", "trained_version", "state")
    return select(*(experiences.c[name] for name in names)).where(experiences.c.msg_id.in_(msg_ids)).with_for_update()


def _delete_named(connection: Connection, msg_ids: Collection[str], rows: Sequence[Any]) -> set[str]:
    """Delete exchanges with their experiences, the `rows`; the replies that they were compared with."""
    about = or_(feedback.c.msg_id.in_(msg_ids), feedback.c.other_msg_id.in_(msg_ids))
    compared = connection.execute(select(feedback.c.msg_id, feedback.c.other_msg_id).where(about)).all()
    regroup(connection, rows)
    delete_with_exchanges(connection, rows)
    delete_by(connection, exchanges, exchanges.c.msg_id, msg_ids)
    forget_feedback(connection, msg_ids)
    return {name for row in compared for name in row if name is not None} - set(msg_ids)
