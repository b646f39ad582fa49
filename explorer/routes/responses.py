"""Responses by their ids: from the ledger, or a background response from its engine.

Any worker can answer for a background response: it asks all engines.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import QueryParams

from tuneloop.explorer.auth import Caller, caller_of
from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.reply_id import ReplyIdSigner
from tuneloop.explorer.dialects.dialect import RESPONSES
from tuneloop.explorer.dialects.responses_native import UNFINISHED, restore_client_fields
from tuneloop.explorer.dialects.responses_request import normalize, untranslatable_reason
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.proxy.background_responses import response_path
from tuneloop.shared.errors import EngineError, LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.recording.stored_completions import StoredCompletions, StoredExchange

Json = dict[str, Any]

_FLUSH_TIMEOUT_S = 2.0  # a reply that was acknowledged is in the database a few milliseconds later
_RECORDING_TIMEOUT_S = 5.0  # a worker looks once a second for what is finished
_RETRY_S = 0.05
_ENGINE_TIMEOUT_S = 30.0  # nothing is sampled for these answers, but the engine may be busy
_FIRST_EVENT_S = 30.0  # from when on a client is told that it waits

#: Tells a client of a stream nothing but that its request was heard.
_COMMENT = b":\n\n"

_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class StoredResponse(NamedTuple):
    """A response in the ledger, and the body of its request."""

    record: StoredExchange
    body: Json

    @property
    def background(self) -> bool:
        """Whether it is a background response, which an engine has too."""
        return self.body.get("background") is True

    @property
    def whole(self) -> bool:
        """Whether it is complete."""
        return any(each.finish_reason is not None for each in self.record.choices)


class HeldResponse(NamedTuple):
    """An engine's answer about a background response that it has."""

    engine: Engine
    status: int
    response: Json


#: A recorded response of a caller's tenant, by its id.
ReadStored = Callable[[Caller, str], Awaitable[StoredExchange | None]]


def stored_reader(stored: StoredCompletions) -> ReadStored:
    """Reads recorded responses of the database."""

    async def read(caller: Caller, response_id: str) -> StoredExchange | None:
        return await asyncio.to_thread(stored.get, caller.tenant, response_id, endpoint=RESPONSES)

    return read


class StoredResponses:
    """The responses that are finished, and those in progress."""

    def __init__(
        self,
        *,
        signer: ReplyIdSigner,
        read: ReadStored,
        control_client: ControlClient,
        fleet: Fleet,
        rebuild: Callable[[Json, Json, str], Awaitable[Json]],
        default_model: str,
    ) -> None:
        self._signer = signer
        self._read_stored = read
        self._control_client = control_client
        self._fleet = fleet
        self._rebuild = rebuild
        self._default_model = default_model

    async def get(self, caller: Caller, response_id: str) -> Json:
        """The response of an id. Raises RequestRefused if there is none."""
        stored = await self._read(caller, response_id)
        if stored and not stored.background:
            return await self._rebuild_response(stored)
        held = await self._ask_engines("GET", response_id)
        if held and held.status == 200:
            return await self._after_recording(caller, response_id, held, stored)
        return await self._rebuild_response(stored or await self._read_after_flush(caller, response_id))

    async def cancel(self, caller: Caller, response_id: str) -> Json:
        """Cancel a response; returns it. Raises RequestRefused if it is not in progress."""
        stored = await self._read(caller, response_id)
        if stored is None and (held := await self._ask_engines("POST", response_id, "/cancel")):
            if held.status == 200:
                return held.response
            error = held.response["error"]
            raise _error(error.get("message"), held.status)
        stored = stored or await self._read_after_flush(caller, response_id)
        if not (stored.whole or stored.background):
            raise _not_found(response_id)
        raise _error("Cannot cancel a synchronous response.", 400)

    async def stream(self, caller: Caller, response_id: str, starting_after: int | None) -> AsyncIterator[bytes]:
        """The events of a background response with a stream, past and future. Raises RequestRefused."""
        stored = await self._read(caller, response_id)
        held = None if stored and not stored.background else await self._ask_engines("GET", response_id)
        if held is None:
            await self.get(caller, response_id)  # it may not exist at all
            raise _error(f"Unknown response_id: {response_id}", 400)
        await self._after_recording(caller, response_id, held, stored)
        after = "" if starting_after is None else f"&starting_after={starting_after}"
        reply = await held.engine.http.request("GET", f"{response_path(response_id)}?stream=true{after}")
        events = _events(reply)
        try:
            first = await anext(events, b"")
        except EngineError:  # vLLM notices only after it has sent a head with 200
            first = b""
        # After the last event of a response vLLM would let its client wait for ever.
        if not first or (first == _COMMENT and held.response.get("status") not in UNFINISHED):
            await events.aclose()
            raise _error(f"Unknown response_id: {response_id}", 400)
        return _resume(first, events)

    async def _read(self, caller: Caller, response_id: str) -> StoredResponse | None:
        reply_id = self._signer.parse(response_id, caller.tenant)
        if reply_id is None or reply_id.msg_id != response_id:
            raise _not_found(response_id)
        record = await self._read_stored(caller, response_id)
        body = orjson.loads(record.request) if record else None
        # An imported row may hold anything.
        return StoredResponse(record, normalize(body)) if record and isinstance(body, dict) else None

    async def _read_after_flush(self, caller: Caller, response_id: str) -> StoredResponse:
        """The same, after all that is acknowledged until now has reached the ledger."""
        if not await self._control_client.wait_until_flushed(_FLUSH_TIMEOUT_S):
            raise LedgerUnavailable("the database is unavailable; acknowledged data is safe on disk: try again later")
        stored = await self._read(caller, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored

    async def _after_recording(
        self, caller: Caller, response_id: str, held: HeldResponse, stored: StoredResponse | None
    ) -> Json:
        """The engine's response. A finished one is in the ledger before the client gets it.

        One that does not come there was erased: an engine keeps what the ledger may not. Raises RequestRefused.
        """
        if held.response.get("status") in UNFINISHED:
            return restore_client_fields(stored.body, held.response) if stored else held.response
        deadline = time.monotonic() + _RECORDING_TIMEOUT_S
        while stored is None and time.monotonic() < deadline:
            await self._control_client.wait_until_flushed(_FLUSH_TIMEOUT_S)
            stored = await self._read(caller, response_id)
            if stored is None:
                await asyncio.sleep(_RETRY_S)
        stored = stored or await self._read_after_flush(caller, response_id)
        return restore_client_fields(stored.body, held.response)

    async def _rebuild_response(self, stored: StoredResponse) -> Json:
        """The response object of a response in the ledger, as far as the ledger has its fields."""
        if not stored.whole:
            raise _not_found(stored.record.msg_id)
        body, choice = stored.body, stored.record.choices[0]
        usage = None
        if untranslatable_reason(body) is None:
            prompt, completion = choice.prompt_tokens, choice.completion_tokens
            total = prompt + completion
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        calls = orjson.loads(choice.tool_calls) if choice.tool_calls else None
        choice_fields = {
            "message": {"content": choice.text, "tool_calls": calls},
            "finish_reason": choice.finish_reason,
        }
        reply = {"model": body.get("model") or self._default_model, "usage": usage, "choices": [choice_fields]}
        return await self._rebuild(body, reply, stored.record.msg_id)

    async def _ask_engines(self, method: str, response_id: str, suffix: str = "") -> HeldResponse | None:
        """The answer of the engine that has the response, else None. Raises RequestRefused if that is unknown."""
        gone = {EngineState.DOWN, EngineState.SPARE}
        engines = [each for each in self._fleet.engines if each.state not in gone]
        path = response_path(response_id) + suffix
        requests = (_fetch_held(engine, method, path) for engine in engines)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        failure = None
        for answer in answers:
            if isinstance(answer, HeldResponse):
                return answer
            if isinstance(answer, EngineError | TimeoutError):
                failure = answer
            elif answer is not None:
                raise answer
        if failure is not None:
            raise RequestRefused(
                "an engine that may have the response does not answer",
                status=503,
                code="engine_unavailable",
                retry_after_s=2.0,
            )
        return None


async def _fetch_held(engine: Engine, method: str, path: str) -> HeldResponse | None:
    async with asyncio.timeout(_ENGINE_TIMEOUT_S):
        reply = await engine.http.request(method, path)
        try:
            body = await reply.read()
        finally:
            reply.close()
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if reply.status == 404:
        return None
    is_answer = isinstance(parsed, dict) and (reply.status == 200 or isinstance(parsed.get("error"), dict))
    if not is_answer or reply.status in (401, 403) or reply.status >= 500:
        raise EngineError(f"the engine answered {reply.status}")
    return HeldResponse(engine, reply.status, parsed)


async def _events(reply: EngineReply) -> AsyncGenerator[bytes]:
    """The blocks of an engine's stream; before them a comment, if the first one does not come soon."""
    blocks = reply.blocks()
    first = asyncio.ensure_future(anext(blocks, b""))
    try:
        await asyncio.wait({first}, timeout=_FIRST_EVENT_S)
        if not first.done():
            yield _COMMENT
        if block := await first:
            yield block
        async for block in blocks:
            yield block
    finally:
        first.cancel()
        reply.close()


async def _resume(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events):
        yield first
        async for block in events:
            yield block


def add_routes(app: FastAPI) -> None:
    """Add the routes to the app."""

    @app.get(f"{RESPONSES}/{{response_id}}")
    async def retrieve(response_id: str, request: Request, responses: ResponsesOf) -> Response:
        caller = caller_of(request.scope)
        stream, after = _parse_stream(request.query_params), _parse_after(request.query_params)
        if stream:
            events = await responses.stream(caller, response_id, after)
            return StreamingResponse(events, media_type="text/event-stream")
        return Response(orjson.dumps(await responses.get(caller, response_id)), media_type="application/json")

    @app.post(f"{RESPONSES}/{{response_id}}/cancel")
    async def cancel(response_id: str, request: Request, responses: ResponsesOf) -> Response:
        return Response(
            orjson.dumps(await responses.cancel(caller_of(request.scope), response_id)),
            media_type="application/json",
        )


def _responses(request: Request) -> StoredResponses:
    found: StoredResponses = request.app.state.services.responses
    return found


ResponsesOf = Annotated[StoredResponses, Depends(_responses)]


def _parse_stream(query: QueryParams) -> bool:
    value = query.get("stream", "false").lower()
    if value not in (*_TRUE, *_FALSE):
        raise RequestRefused("stream must be true or false", code="invalid_type", param="stream")
    return value in _TRUE


def _parse_after(query: QueryParams) -> int | None:
    value = query.get("starting_after")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise RequestRefused("starting_after must be an integer from 0", code="invalid_type", param="starting_after")
    return int(value)


def _not_found(response_id: str) -> RequestRefused:
    message = f"Response with id '{response_id}' not found."
    return RequestRefused(message, status=404, code="not_found", param="response_id")


def _error(message: object, status: int) -> RequestRefused:
    return RequestRefused(str(message), status=status, code="invalid_value", param="response_id")
