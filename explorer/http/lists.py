"""OpenAI's lists: the query of a page, and its answer."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.shared.errors import RequestRefused

#: The entries of a page, where nothing is said and at most.
DEFAULT_LIMIT, MAX_LIMIT = 20, 100

_DIGITS = 9


Order = Literal["asc", "desc"]


class PageQuery(NamedTuple):
    limit: int
    order: Order
    after: str | None


def parse_page_query(
    query: QueryParams, *, default: int = DEFAULT_LIMIT, most: int = MAX_LIMIT, order: Order = "asc"
) -> PageQuery:
    limit, wanted = parse_number(query.get("limit", str(default))), query.get("order", order)
    if limit is None or not 1 <= limit <= most:
        raise RequestRefused(f"limit must be an integer from 1 to {most}", code="out_of_range", param="limit")
    if wanted not in {"asc", "desc"}:
        raise RequestRefused("order must be asc or desc", code="invalid_value", param="order")
    return PageQuery(limit, "desc" if wanted == "desc" else "asc", query.get("after"))


def parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def page_response(data: Sequence[Any], *, more: bool) -> Response:
    """A page of objects that have an `id` each."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ends, "has_more": more})


def json_response(body: object, *, no_store: bool = False) -> Response:
    headers = {"cache-control": "no-store"} if no_store else None
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
