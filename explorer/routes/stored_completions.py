"""OpenAI's stored completions and responses: a tenant lists, reads, relabels and deletes its exchanges."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from tuneloop.explorer.arrivals import Arrivals
from tuneloop.explorer.auth import caller_of
from tuneloop.explorer.dialects.dialect import RESPONSES, ResponsesDialect
from tuneloop.explorer.dialects.responses_request import normalize
from tuneloop.explorer.http.bodies import read_object, wrong_type
from tuneloop.explorer.http.lists import PageQuery, json_response, page_response, parse_page_query
from tuneloop.explorer.recorder import Recorder
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.stored_completions import (
    ENDPOINT,
    MAX_EXAMINED,
    MAX_KEY,
    MAX_PAIRS,
    MAX_VALUE,
    Deletion,
    StoredCompletion,
    StoredCompletions,
    StoredExchange,
    completion,
    messages,
    tag_of_model,
    tag_of_pair,
)
from tuneloop.shared.operations.explain import Explanation, explain
from tuneloop.shared.settings.settings import Settings

#: Bytes of the largest metadata, each character of it escaped.
_MAX_BODY_BYTES = 256 << 10

_FLUSH_TIMEOUT_S = 2.0  # a reply that was acknowledged is in the database a few milliseconds later
_LEASE_S = 10.0  # a batch that is being learnt from is usually done soon

_PAIR = re.compile(r"metadata\[(.*)\]", re.DOTALL).fullmatch

_T = TypeVar("_T")

Json = dict[str, Any]


class CompletionReader:
    """Looks in the ledger, and waits for the outbox before it answers that there is nothing."""

    def __init__(self, request: Request) -> None:
        services, caller = request.app.state.services, caller_of(request.scope)
        self._wait_until_taken = services.control_client.wait_until_taken
        self.recorder: Recorder = services.recorder
        self._arrivals: Arrivals = services.arrivals
        self.tenant, self.sees_all = caller.tenant, caller.sees_all

    async def wait_until_taken(self) -> bool:
        """Wait until what is in the outbox now is in the database; False if that is unavailable."""
        return bool(await self._wait_until_taken(_FLUSH_TIMEOUT_S))

    async def require_flushed(self) -> None:
        """The same. Raises LedgerUnavailable where that does not happen in time."""
        if not await self.wait_until_taken():
            raise LedgerUnavailable("the database is unavailable; acknowledged data is safe on disk: try again later")

    async def find(self, msg_id: str, query: Callable[[], _T | None], refusal: RequestRefused | None = None) -> _T:
        found = await asyncio.to_thread(query)
        if found is None:
            await self.require_flushed()
            found = await self._arrivals.find(msg_id, self.tenant, query)
        if found is None:
            message = f"no stored completion has the id {msg_id!r}"
            raise refusal or RequestRefused(message, status=404, code="not_found", param="completion_id")
        return found


CompletionReaderOf = Annotated[CompletionReader, Depends(CompletionReader)]


def add_routes(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    completions, default_model = ledger.stored, settings.served_model_name

    def to_object(stored: StoredExchange) -> StoredCompletion:
        return completion(stored, default_model=default_model)

    @app.get(ENDPOINT)
    async def list_completions(request: Request, reader: CompletionReaderOf) -> Response:
        query = parse_page_query(request.query_params)
        tags = wanted_tags(reader.tenant, request.query_params, reader.recorder.pairs_as_stored)
        await reader.wait_until_taken()  # a list may lag behind, so an unavailable database is no error here
        return await asyncio.to_thread(lambda: _page(completions, reader.tenant, query, tags, to_object))

    @app.get(f"{ENDPOINT}/{{msg_id}}")
    async def get_completion(msg_id: str, reader: CompletionReaderOf) -> Response:
        return json_response(to_object(await reader.find(msg_id, lambda: completions.get(reader.tenant, msg_id))))

    @app.post(f"{ENDPOINT}/{{msg_id}}")
    async def update_completion(msg_id: str, request: Request, reader: CompletionReaderOf) -> Response:
        pairs = reader.recorder.pairs_as_stored(parse_metadata(await read_object(request, max_bytes=_MAX_BODY_BYTES)))
        await reader.find(msg_id, lambda: completions.change_metadata(reader.tenant, msg_id, pairs=pairs) or None)
        return json_response(to_object(await reader.find(msg_id, lambda: completions.get(reader.tenant, msg_id))))

    @app.delete(f"{ENDPOINT}/{{msg_id}}")
    async def delete_completion(msg_id: str, reader: CompletionReaderOf) -> Response:
        if await reader.find(msg_id, lambda: completions.delete(reader.tenant, msg_id)) is Deletion.LEASED:
            message = f"the trainer is learning from {msg_id!r}; nothing was deleted: try again when it is done"
            raise RequestRefused(message, status=409, code="leased", retry_after_s=_LEASE_S)
        return json_response({"object": "chat.completion.deleted", "id": msg_id, "deleted": True})

    @app.get(f"{ENDPOINT}/{{msg_id}}/messages")
    async def list_messages(msg_id: str, request: Request, reader: CompletionReaderOf) -> Response:
        query = parse_page_query(request.query_params)
        stored = await reader.find(msg_id, lambda: completions.get(reader.tenant, msg_id))
        return _slice(messages(stored), query)

    @app.get(f"{ENDPOINT}/{{msg_id}}/explain")
    async def explain_reply(request: Request, msg_id: str, reader: CompletionReaderOf) -> Response:
        outbox = request.app.state.services.drain_status

        def read() -> Explanation:
            return explain(ledger, settings, msg_id, outbox, tenant=reader.tenant, sees_all=reader.sees_all)

        found = await asyncio.to_thread(read)
        if not found.replies:
            await reader.require_flushed()
            found = await asyncio.to_thread(read)
        if not found.replies:
            raise RequestRefused("; ".join(found.sentences), status=404, code="not_found", param="completion_id")
        return json_response(found.as_json())


def add_responses(app: FastAPI, settings: Settings, ledger: Ledger) -> None:
    completions, default_model = ledger.stored, settings.served_model_name

    @app.get(f"{RESPONSES}/{{response_id}}")
    async def retrieve(response_id: str, request: Request, reader: CompletionReaderOf) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("0", "false"):
            message = "a stored response is not streamed: read it without `stream`"
            raise RequestRefused(message, code="invalid_value", param="stream")
        services, message = request.app.state.services, f"Response with id '{response_id}' not found."
        not_found = RequestRefused(message, status=404, code="not_found", param="response_id")
        reply_id = services.feedback.signer.parse(response_id, reader.tenant)
        if reply_id is None or reply_id.msg_id != response_id:
            raise not_found
        query = partial(completions.get, reader.tenant, response_id, endpoint=RESPONSES)
        found = await reader.find(response_id, query, not_found)
        body, choice, usage = orjson.loads(found.request), found.choices[0], None
        # An imported row may hold anything. One that was cut off is no response.
        if not isinstance(body, dict) or all(each.finish_reason is None for each in found.choices):
            raise not_found
        body = normalize(body)
        if choice.prompt_tokens:  # the engine's own answers have none
            prompt, completion = choice.prompt_tokens, choice.completion_tokens
            total = prompt + completion
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        calls = orjson.loads(choice.tool_calls) if choice.tool_calls else None
        reply = {
            "model": body.get("model") or default_model,
            "usage": usage,
            "choices": [
                {"message": {"content": choice.text, "tool_calls": calls}, "finish_reason": choice.finish_reason}
            ],
        }
        dialect: ResponsesDialect = services.dialects[RESPONSES]
        return json_response(await dialect.rebuild(body, reply, response_id))


def wanted_tags(
    tenant: str,
    query: QueryParams,
    as_stored: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda pairs: pairs,
) -> set[bytes]:
    tags = {tag_of_model(tenant, model) for model in query.getlist("model")}
    pairs = []
    for name, value in query.multi_items():
        if pair := _PAIR(name):
            _check_pair_length(pair[1], value)
            pairs += [tag_of_pair(tenant, *each) for each in as_stored({pair[1]: value}).items()]
        elif name.startswith("metadata"):
            raise RequestRefused("write metadata[key]=value", code="invalid_value", param="metadata")
    if len(pairs) > MAX_PAIRS:
        raise _too_many()
    return tags.union(pairs)


def parse_metadata(body: dict[str, Any]) -> dict[str, str]:
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
        _check_pair_length(key, value)
    return pairs


def _too_many() -> RequestRefused:
    return RequestRefused(f"metadata must have at most {MAX_PAIRS} pairs", code="too_many", param="metadata")


def _check_pair_length(key: str, value: str) -> None:
    if len(key) > MAX_KEY:
        message = f"a key of metadata must have at most {MAX_KEY} characters"
        raise RequestRefused(message, code="too_long", param="metadata")
    if len(value) > MAX_VALUE:
        param = f"metadata.{key}"
        raise RequestRefused(f"{param} must have at most {MAX_VALUE} characters", code="too_long", param=param)


def _page(
    completions: StoredCompletions,
    tenant: str,
    query: PageQuery,
    tags: set[bytes],
    to_object: Callable[[StoredExchange], StoredCompletion],
) -> Response:
    cursor = None if query.after is None else completions.cursor_of(tenant, query.after)
    if query.after is not None and cursor is None:
        raise _unknown_after(query.after)
    page = completions.page(tenant, wanted=tags, after=cursor, order=query.order, limit=query.limit)
    if page is None:
        message = (
            f"more than {MAX_EXAMINED} stored completions have each of these, and none of the next"
            f" {MAX_EXAMINED} has all of them: filter by a rarer pair, or by fewer"
        )
        raise RequestRefused(message, code="filter_too_broad", param="metadata")
    return page_response([to_object(each) for each in page.found], more=page.more)


def _slice(found: Sequence[dict[str, Any]], query: PageQuery) -> Response:
    items = found if query.order == "asc" else found[::-1]
    if query.after is not None:
        ids = [each["id"] for each in items]
        if query.after not in ids:
            raise _unknown_after(query.after)
        items = items[ids.index(query.after) + 1 :]
    return page_response(items[: query.limit], more=len(items) > query.limit)


def _unknown_after(after: str) -> RequestRefused:
    return RequestRefused(f"after: nothing in this list has the id {after!r}", code="invalid_value", param="after")
