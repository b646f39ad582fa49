"""OpenAI's stored completions: any client may list, read, relabel and delete the exchanges of the chat route."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.reply_id import TENANT
from tuneloop.explorer.http.bodies import read_object, wrong_type
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.recording.completion_object import (
    MAX_KEY,
    MAX_PAIRS,
    MAX_VALUE,
    Stored,
    StoredCompletion,
    completion,
    messages,
    tag_of_model,
    tag_of_pair,
)
from tuneloop.shared.ledger.recording.stored_completions import LOOKED_AT, Deletion, StoredCompletions
from tuneloop.shared.ledger.recording.tags import ENDPOINT, Place

MAX_LIMIT, DEFAULT_LIMIT = 100, 20

#: Bytes of the largest metadata, each character of it escaped.
_MAX_BODY_BYTES = 256 << 10

_PATIENCE_S = 2.0  # a reply that was acknowledged is in the database a few milliseconds later
_LEASE_S = 10.0  # a batch that is being learnt from is usually done soon

_PAIR = re.compile(r"metadata\[(.*)\]", re.DOTALL).fullmatch

_T = TypeVar("_T")


class PageQuery(NamedTuple):
    """Which part of a list is wanted."""

    limit: int
    order: Literal["asc", "desc"]
    after: str | None


class CompletionReader:
    """What is on its way to the ledger, waited for before anybody is told that it is not there."""

    def __init__(self, request: Request) -> None:
        self._control_client: ControlClient = request.app.state.road.control_client

    async def wait_until_flushed(self) -> bool:
        """Wait until what is on disk now is in the database; False if that is away."""
        return await self._control_client.wait_until_flushed(_PATIENCE_S)

    async def find(self, msg_id: str, look: Callable[[], _T | None]) -> _T:
        """What `look` finds. Raises RequestRefused if it finds nothing of that name."""
        found = await asyncio.to_thread(look)
        if found is None:
            if not await self.wait_until_flushed():
                raise LedgerUnavailable("the database is away; what was acknowledged is safe on disk: ask again later")
            found = await asyncio.to_thread(look)
        if found is None:
            message = f"no stored completion has the id {msg_id!r}"
            raise RequestRefused(message, status=404, code="not_found", param="completion_id")
        return found


CompletionReaderOf = Annotated[CompletionReader, Depends(CompletionReader)]


def add_routes(app: FastAPI, completions: StoredCompletions, *, default_model: str) -> None:
    """Add the routes to the app. `default_model` answered the requests that named none."""

    def told(stored: Stored) -> StoredCompletion:
        return completion(stored, default_model=default_model)

    @app.get(ENDPOINT)
    async def listed(request: Request, recorded: CompletionReaderOf) -> Response:
        bounds, wanted = parse_page_query(request.query_params), wanted_tags(request.query_params)
        await recorded.wait_until_flushed()  # a list may lag behind, so it does not fail for that
        return await asyncio.to_thread(lambda: _list(*_page(completions, bounds, wanted, told)))

    @app.get(f"{ENDPOINT}/{{msg_id}}")
    async def retrieved(msg_id: str, recorded: CompletionReaderOf) -> Response:
        return _json(told(await recorded.find(msg_id, lambda: completions.get(TENANT, msg_id))))

    @app.post(f"{ENDPOINT}/{{msg_id}}")
    async def updated(msg_id: str, request: Request, recorded: CompletionReaderOf) -> Response:
        pairs = parse_metadata(await read_object(request, max_bytes=_MAX_BODY_BYTES))
        await recorded.find(msg_id, lambda: completions.change_metadata(TENANT, msg_id, pairs=pairs) or None)
        return _json(told(await recorded.find(msg_id, lambda: completions.get(TENANT, msg_id))))

    @app.delete(f"{ENDPOINT}/{{msg_id}}")
    async def deleted(msg_id: str, recorded: CompletionReaderOf) -> Response:
        if await recorded.find(msg_id, lambda: completions.delete(TENANT, msg_id)) is Deletion.LEASED:
            message = f"the trainer is learning from {msg_id!r}; nothing was deleted: try again when it is done"
            raise RequestRefused(message, status=409, code="leased", retry_after_s=_LEASE_S)
        return _json({"object": "chat.completion.deleted", "id": msg_id, "deleted": True})

    @app.get(f"{ENDPOINT}/{{msg_id}}/messages")
    async def said(msg_id: str, request: Request, recorded: CompletionReaderOf) -> Response:
        bounds = parse_page_query(request.query_params)
        stored = await recorded.find(msg_id, lambda: completions.get(TENANT, msg_id))
        return _list(*_part(messages(stored), bounds))


def parse_page_query(query: QueryParams) -> PageQuery:
    """The part of a list that a query asks for. Raises RequestRefused for what makes no sense."""
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "asc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestRefused(f"limit must be an integer from 1 to {MAX_LIMIT}", code="out_of_range", param="limit")
    if order == "asc":
        return PageQuery(int(limit), "asc", query.get("after"))
    if order == "desc":
        return PageQuery(int(limit), "desc", query.get("after"))
    raise RequestRefused("order must be asc or desc", code="invalid_value", param="order")


def wanted_tags(query: QueryParams) -> set[bytes]:
    """The tags of what a query looks for."""
    wanted = {tag_of_model(TENANT, model) for model in query.getlist("model")}
    pairs = []
    for name, value in query.multi_items():
        if pair := _PAIR(name):
            _must_fit(pair[1], value)
            pairs.append(tag_of_pair(TENANT, pair[1], value))
        elif name.startswith("metadata"):
            raise RequestRefused("write metadata[key]=value", code="invalid_value", param="metadata")
    if len(pairs) > MAX_PAIRS:
        raise _too_many()
    return wanted.union(pairs)


def parse_metadata(body: dict[str, Any]) -> dict[str, str]:
    """The metadata that a body brings; null is none. Raises RequestRefused for what is not OpenAI's."""
    if "metadata" not in body:
        raise RequestRefused("metadata is missing", code="missing_required_parameter", param="metadata")
    pairs = body["metadata"]
    if pairs is None:
        return {}
    if not isinstance(pairs, dict):
        raise wrong_type("metadata", "an object of strings, or null")
    if len(pairs) > MAX_PAIRS:
        raise _too_many()
    for key, value in pairs.items():
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{key}", "a string")
        _must_fit(key, value)
    return pairs


def _too_many() -> RequestRefused:
    return RequestRefused(f"metadata must have at most {MAX_PAIRS} pairs", code="too_many", param="metadata")


def _must_fit(key: str, value: str) -> None:
    if len(key) > MAX_KEY:
        message = f"a key of metadata must have at most {MAX_KEY} characters"
        raise RequestRefused(message, code="too_long", param="metadata")
    if len(value) > MAX_VALUE:
        param = f"metadata.{key}"
        raise RequestRefused(f"{param} must have at most {MAX_VALUE} characters", code="too_long", param=param)


def _page(
    completions: StoredCompletions, bounds: PageQuery, wanted: set[bytes], told: Callable[[Stored], StoredCompletion]
) -> tuple[list[tuple[str, StoredCompletion]], bool]:
    place = _place(completions, bounds.after)
    page = completions.page(TENANT, wanted=wanted, after=place, order=bounds.order, limit=bounds.limit)
    if page is None:
        message = (
            f"more than {LOOKED_AT} stored completions have each of these, and none of the next {LOOKED_AT} has all of "
            "them: ask for a rarer pair, or for fewer"
        )
        raise RequestRefused(message, code="filter_too_broad", param="metadata")
    return [(each.msg_id, told(each)) for each in page.found], page.more


def _place(completions: StoredCompletions, after: str | None) -> Place | None:
    if after is None:
        return None
    place = completions.place_of(TENANT, after)
    if place is None:
        raise _unknown_after(after)
    return place


def _part(found: Sequence[dict[str, Any]], bounds: PageQuery) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """The messages that are wanted, with their ids, and whether there are more."""
    items = [(each["id"], each) for each in (found if bounds.order == "asc" else reversed(found))]
    if bounds.after is not None:
        ids = [its_id for its_id, _ in items]
        if bounds.after not in ids:
            raise _unknown_after(bounds.after)
        items = items[ids.index(bounds.after) + 1 :]
    return items[: bounds.limit], len(items) > bounds.limit


def _unknown_after(after: str) -> RequestRefused:
    return RequestRefused(f"after: nothing in this list has the id {after!r}", code="invalid_value", param="after")


def _list(items: Sequence[tuple[str, object]], more: bool) -> Response:
    ids = [its_id for its_id, _ in items]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return _json({"object": "list", "data": [each for _, each in items], **ends, "has_more": more})


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
