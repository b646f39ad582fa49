"""Stored completions: OpenAI's object of an exchange, its tags, and verbs to list, get, relabel and delete."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Raw
from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    and_,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    tuple_,
)

from tuneloop.shared.experience import Exchange, State
from tuneloop.shared.ledger.recording.retention import (
    delete_by,
    delete_with_exchanges,
    forget_feedback,
    mark_deleted,
    regroup,
)
from tuneloop.shared.ledger.recording.rewards import RewardsPart
from tuneloop.shared.ledger.storage import codec
from tuneloop.shared.ledger.storage.database import alone, put
from tuneloop.shared.ledger.storage.schema import changed_metadata, deletions, exchanges, experiences, feedback, tags

#: OpenAI's bounds of metadata.
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512

_NULL = Raw(b"null")
_TRACE = b"t"
_DIGEST_BYTES = 16


class StoredRequest(msgspec.Struct, frozen=True):
    model: Any = None
    metadata: Any = None
    user: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    response_format: Raw = _NULL
    service_tier: Raw = _NULL
    seed: Raw = _NULL
    temperature: Raw = _NULL
    top_p: Raw = _NULL
    presence_penalty: Raw = _NULL
    frequency_penalty: Raw = _NULL


StoredCompletion = dict[str, Any]


class StoredChoice(msgspec.Struct, frozen=True, kw_only=True):
    choice: int
    text: str
    tool_calls: bytes | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    temperature: float


class StoredExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange as the ledger holds it; `metadata` None: that of the request."""

    msg_id: str
    received_at: float
    request: bytes
    metadata: str | None
    choices: tuple[StoredChoice, ...]


_requests = msgspec.json.Decoder(StoredRequest)


def _read_request(request: bytes) -> StoredRequest:
    try:
        return _requests.decode(request)
    except msgspec.MsgspecError:  # an imported row may hold anything
        return StoredRequest()


def completion(stored: StoredExchange, *, default_model: str) -> StoredCompletion:
    """The object of an exchange. `default_model` answered a request that named none."""
    request, choices = _read_request(stored.request), stored.choices
    prompt_tokens = max((each.prompt_tokens for each in choices), default=0)
    completion_tokens = sum(each.completion_tokens for each in choices)
    sampled_at = next((each.temperature for each in choices), 1.0)
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    changed = stored.metadata and msgspec.json.decode(stored.metadata)
    return {
        "object": "chat.completion",
        "id": stored.msg_id,
        "model": request.model if isinstance(request.model, str) else default_model,
        "created": int(stored.received_at),
        "request_id": stored.msg_id,
        "tool_choice": request.tool_choice,
        "usage": usage,
        "seed": request.seed,
        "top_p": _or(request.top_p, b"1.0"),
        "temperature": _or(request.temperature, msgspec.json.encode(sampled_at)),
        "presence_penalty": _or(request.presence_penalty, b"0.0"),
        "frequency_penalty": _or(request.frequency_penalty, b"0.0"),
        "system_fingerprint": None,
        "input_user": request.user,
        "service_tier": request.service_tier,
        "tools": request.tools,
        "metadata": metadata_as_text(request.metadata) if changed is None else changed,
        "choices": [
            {
                "index": each.choice,
                "message": {
                    "role": "assistant",
                    "content": each.text if each.text or not each.tool_calls else None,
                    "refusal": None,
                    "tool_calls": Raw(each.tool_calls) if each.tool_calls else None,
                    "function_call": None,
                },
                "finish_reason": each.finish_reason,
                "logprobs": None,
            }
            for each in choices
        ],
        "response_format": request.response_format,
    }


def messages(stored: StoredExchange) -> list[dict[str, Any]]:
    """The messages of the request, each with an id of its own, the oldest first."""
    try:
        messages = msgspec.json.decode(stored.request)["messages"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []
    found = enumerate(each for each in messages if isinstance(each, dict)) if isinstance(messages, list) else ()
    said = []
    for number, each in found:
        content = each.get("content")
        parts = content if isinstance(content, list) else None
        fields = {"content": None if parts is not None else content, "name": each.get("name"), "content_parts": parts}
        said.append({"role": each.get("role"), **each, **fields, "id": f"{stored.msg_id}-{number}"})
    return said


def metadata_as_text(metadata: object) -> dict[str, str]:
    """A request's metadata as OpenAI's: a value that is no string becomes its JSON."""
    if not isinstance(metadata, dict):
        return {}
    return {
        str(key): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        for key, value in metadata.items()
        if value is not None
    }


def as_json(pairs: Mapping[str, str]) -> str:
    return msgspec.json.encode(pairs).decode()


def tags_of(tenant: str, request: bytes, metadata: Mapping[str, str] | None = None) -> set[bytes]:
    """Search fields of an exchange. Changed `metadata` replaces the request's."""
    read = _read_request(request)
    found = {tag_of_model(tenant, read.model)} if isinstance(read.model, str) else set()
    pairs = metadata_as_text(read.metadata) if metadata is None else metadata
    # OpenAI's clients cannot ask for more, and a request may bring any number.
    findable = ((key, value) for key, value in [*pairs.items()][:MAX_PAIRS])
    return found | {
        tag_of_pair(tenant, key, value) for key, value in findable if len(key) <= MAX_KEY and len(value) <= MAX_VALUE
    }


@lru_cache
def tag_of_model(tenant: str, model: str) -> bytes:
    return _digest(tenant, "model", model)


def tag_of_pair(tenant: str, key: str, value: str) -> bytes:
    return _digest(tenant, "metadata", key, value)


def _tag_of_trace(tenant: str, key: str) -> bytes:
    """By which replies are found that are of a trace. Longer than other tags, which it outlives."""
    return _TRACE + _digest(tenant, "trace", key)


def _digest(*words: str) -> bytes:
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=_DIGEST_BYTES).digest()


def _or(value: Raw, neutral: bytes) -> Raw:
    return value if bytes(value) != b"null" else Raw(neutral)


#: The endpoint whose exchanges are stored completions. Not a parameter: the partial index would not be used.
ENDPOINT = "/v1/chat/completions"
ENDPOINT_IN_SQL: ColumnElement[str] = literal_column(f"'{ENDPOINT}'")


class PageCursor(NamedTuple):
    received_at: float
    msg_id: str


def tag(connection: Connection, exchanges: Sequence[Exchange]) -> None:
    """Let exchanges be found that were not stored before."""
    rows = [
        _tag_row(tag, each.received_at, each.msg_id)
        for each in exchanges
        for tag in (tags_of(each.tenant, each.request) if each.endpoint == ENDPOINT else set())
        | {_tag_of_trace(each.tenant, key) for key in each.traces}
    ]
    put(connection, tags, rows)


def _tag_row(tag: bytes, received_at: float, msg_id: str) -> dict[str, object]:
    return {"tag": tag, "received_at": received_at, "msg_id": msg_id}


Order = Literal["asc", "desc"]

_Key = TypeVar("_Key")

#: Bytes of the requests that one page is made from; one completion is a page whatever it has.
MAX_PAGE_BYTES = 16 << 20

#: Completions that are looked at for one page of those with several tags.
MAX_EXAMINED = 10_000


class CompletionPage(NamedTuple):
    found: list[StoredExchange]
    more: bool


class Deletion(StrEnum):
    DONE = "done"
    LEASED = "leased"  # the trainer is learning from it: nothing was changed


class StoredCompletions(RewardsPart):
    def cursor_of(self, tenant: str, msg_id: str) -> PageCursor | None:
        for table in (exchanges, deletions):
            query = select(table.c.received_at).where(table.c.msg_id == msg_id, table.c.tenant == tenant)
            if found := self._read(query):
                return PageCursor(found[0].received_at, msg_id)
        return None

    def page(
        self, tenant: str, *, wanted: Collection[bytes] = (), after: PageCursor | None, order: Order, limit: int
    ) -> CompletionPage | None:
        """The next completions by request time that have all the `wanted` tags.

        A page may be shorter than `limit` before the end: it has MAX_PAGE_BYTES at most. None if none of the
        MAX_EXAMINED next completions with the rarest tag has the other tags, and more exist.
        """
        if len(wanted) > 1:
            keys, more = self._with_several(wanted, after, order, limit)
            if more and not keys:
                return None
        else:
            of_one = [select_tagged(tag, after, order, limit + 1) for tag in wanted]
            rows = self._read(of_one[0] if of_one else select_page(tenant, after, order, limit + 1))
            keys, more = [row.msg_id for row in rows[:limit]], len(rows) > limit
        # The first of the completions whose requests are not too long together, and one at least.
        head = func.substr(exchanges.c.request, 1, codec.TEXT_HEAD, type_=LargeBinary).label("head")
        columns = exchanges.c.msg_id, head, func.length(exchanges.c.request).label("size")
        rows = self._read(select(*columns).where(exchanges.c.msg_id.in_(keys)))
        sizes = {row.msg_id: codec.text_size(row.head or b"", row.size) for row in rows}
        if len(some := first_of_size(keys, [sizes.get(key, 0) for key in keys])) < len(keys):
            keys, more = some, True
        found = self._read_stored(tenant, keys)
        return CompletionPage([found[msg_id] for msg_id in keys if msg_id in found], more)

    def get(self, tenant: str, msg_id: str, *, endpoint: str = ENDPOINT) -> StoredExchange | None:
        return self._read_stored(tenant, [msg_id], endpoint).get(msg_id)

    def replies_of_trace(self, tenant: str, keys: Collection[str], *, most: int) -> list[str]:
        """The names of the newest replies, of any endpoint, whose requests carried a name of the trace."""
        wanted = [_tag_of_trace(tenant, key) for key in keys]
        newest = select(tags.c.msg_id).where(tags.c.tag.in_(wanted)).order_by(tags.c.received_at.desc()).limit(most)
        return list(dict.fromkeys(msg_id for (msg_id,) in self._read(newest)))

    def change_metadata(self, tenant: str, msg_id: str, *, pairs: Mapping[str, str]) -> bool:
        with self._write() as connection:
            alone(connection, "record")
            row = connection.execute(_exchange(tenant, msg_id)).one_or_none()
            if row is not None:
                connection.execute(delete(changed_metadata).where(changed_metadata.c.msg_id == msg_id))
                of_metadata = tags.c.msg_id == msg_id, func.length(tags.c.tag) == _DIGEST_BYTES
                connection.execute(delete(tags).where(*of_metadata))
                connection.execute(insert(changed_metadata).values(msg_id=msg_id, metadata=as_json(pairs)))
                found_by = tags_of(tenant, codec.unpack_text(row.request), pairs)
                put(connection, tags, [_tag_row(each, row.received_at, msg_id) for each in found_by])
            return row is not None

    def delete(self, tenant: str, msg_id: str) -> Deletion | None:
        """Delete a completion, its experiences and the feedback about it, unless one is leased; None if there is none.

        Trained rows count in their version's `purged`. Other replies get their rewards without this one's feedback.
        Later records of it are not stored.
        """
        with self._write() as connection:
            alone(connection, "record")
            exchange = connection.execute(_exchange(tenant, msg_id)).one_or_none()
            if exchange is None:
                return None
            names = ("id", "msg_id", "tenant", "task_id", "run_id", "group_id", "trained_version", "state")
            columns = (experiences.c[name] for name in names)
            query = select(*columns).where(experiences.c.msg_id == msg_id)
            rows = connection.execute(query.with_for_update()).all()
            if any(row.state == State.LEASED for row in rows):
                return Deletion.LEASED
            about = or_(feedback.c.msg_id == msg_id, feedback.c.other_msg_id == msg_id)
            compared = connection.execute(select(feedback.c.msg_id, feedback.c.other_msg_id).where(about)).all()
            regroup(connection, rows)
            delete_with_exchanges(connection, rows)
            delete_by(connection, exchanges, exchanges.c.msg_id, [msg_id])
            forget_feedback(connection, [msg_id])
            others = {name for row in compared for name in row if name is not None} - {msg_id}
            self._rewards.recompute(connection, others)
            mark_deleted(connection, [exchange], at=self._clock())
        return Deletion.DONE

    def _with_several(
        self, wanted: Collection[bytes], after: PageCursor | None, order: Order, limit: int
    ) -> tuple[list[str], bool]:
        counts: dict[bytes, int] = {}  # those beyond MAX_EXAMINED are not counted
        for each in wanted:
            some = select(tags.c.msg_id).where(tags.c.tag == each).limit(MAX_EXAMINED).subquery()
            counts[each] = self._read(select(func.count()).select_from(some))[0][0]
        [driving, *others] = sorted(wanted, key=lambda each: counts[each])
        examined = select_tagged(driving, after, order, MAX_EXAMINED).subquery()
        query = _next(select(examined.c.msg_id), examined, None, order)
        for tag in others:
            same = and_(*(tags.c[name] == examined.c[name] for name in PageCursor._fields))
            query = query.where(exists().where(tags.c.tag == tag, same))
        rows = [row.msg_id for row in self._read(query.limit(limit + 1))]
        if len(rows) > limit:
            return rows[:limit], True
        [(count,)] = self._read(select(func.count()).select_from(examined))
        return rows, count == MAX_EXAMINED

    def _read_stored(self, tenant: str, msg_ids: Sequence[str], endpoint: str = ENDPOINT) -> dict[str, StoredExchange]:
        # Else what is recorded, or deleted, between the two would be there in part.
        ours = and_(exchanges.c.tenant == tenant, exchanges.c.endpoint == endpoint, exchanges.c.msg_id.in_(msg_ids))
        columns = exchanges.c.msg_id, exchanges.c.received_at, exchanges.c.request, changed_metadata.c.metadata
        changed = changed_metadata.c.msg_id == exchanges.c.msg_id
        names = ("choice", "text", "tool_calls", "finish_reason", "completion_tokens", "temperature")
        # Of the blob only how many prompt ids it has: shared/ledger/storage/codec.py.
        prompt = func.substr(experiences.c.blob, 1, 4, type_=LargeBinary).label("prompt")
        replies = select(experiences.c.msg_id, *(experiences.c[name] for name in names), prompt).order_by(
            experiences.c.choice
        )
        found, sampled = self._read_together(
            select(*columns).outerjoin_from(exchanges, changed_metadata, changed).where(ours),
            replies.where(experiences.c.msg_id.in_(msg_ids), experiences.c.correction == 0),
        )
        choices: dict[str, list[StoredChoice]] = defaultdict(list)
        for row in sampled:
            fields = {name: getattr(row, name) for name in names}
            tokens = int.from_bytes(row.prompt, "little")
            choices[row.msg_id].append(StoredChoice(**fields, prompt_tokens=tokens))
        return {
            row.msg_id: StoredExchange(
                msg_id=row.msg_id,
                received_at=row.received_at,
                request=codec.unpack_text(row.request),
                metadata=row.metadata,
                choices=tuple(choices[row.msg_id]),
            )
            for row in found
        }


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
    query = select(exchanges.c.received_at, exchanges.c.msg_id)
    query = query.where(exchanges.c.tenant == tenant, exchanges.c.endpoint == ENDPOINT_IN_SQL)
    return _next(query, exchanges, after, order).limit(limit)


def select_tagged(tag: bytes, after: PageCursor | None, order: Order, limit: int) -> Select[Any]:
    query = select(tags.c.received_at, tags.c.msg_id).where(tags.c.tag == tag)
    return _next(query, tags, after, order).limit(limit)


def _next(query: Select[Any], table: Any, after: PageCursor | None, order: Order) -> Select[Any]:
    columns = [table.c[name] for name in PageCursor._fields]
    if after is not None:
        key = tuple_(*columns)
        query = query.where(key > after if order == "asc" else key < after)
    return query.order_by(*(column.asc() if order == "asc" else column.desc() for column in columns))


def _exchange(tenant: str, msg_id: str) -> Select[Any]:
    ours = and_(exchanges.c.tenant == tenant, exchanges.c.endpoint == ENDPOINT, exchanges.c.msg_id == msg_id)
    names = ("msg_id", "tenant", "received_at", "request")
    return select(*(exchanges.c[name] for name in names)).where(ours).with_for_update()
