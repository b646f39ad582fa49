"""Responses asked for again by their ids: from the ledger if they were answered there and then, else from their engine.

A background response is the engine's: whichever process is asked, it asks the engines.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import QueryParams

from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.reply_id import TENANT, ReplyIdSigner
from tuneloop.explorer.dialects.dialect import RESPONSES
from tuneloop.explorer.dialects.responses_native import UNDER_WAY, as_asked
from tuneloop.explorer.dialects.responses_request import untranslatable
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.proxy.background_responses import path_of
from tuneloop.shared.errors import EngineError, LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.recording.completion_object import Stored
from tuneloop.shared.ledger.recording.stored_completions import StoredCompletions

Json = dict[str, Any]

_PATIENCE_S = 2.0  # a reply that was acknowledged is in the database a few milliseconds later
_AGAIN_S = 0.05
_ENGINE_S = 30.0  # nothing is sampled for these answers, but the engine may be busy

_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class StoredResponse(NamedTuple):
    """A response as the ledger holds it, and the body that asked for it."""

    stored: Stored
    body: Json

    @property
    def background(self) -> bool:
        """Whether an engine has it too."""
        return self.body.get("background") is True

    @property
    def whole(self) -> bool:
        """Whether it came to its end."""
        return any(each.finish_reason is not None for each in self.stored.choices)


class HeldResponse(NamedTuple):
    """What an engine says of a response that it has."""

    engine: Engine
    status: int
    told: Json


class StoredResponses:
    """The responses that were given, and those under way."""

    def __init__(
        self,
        *,
        signer: ReplyIdSigner,
        stored: StoredCompletions,
        control_client: ControlClient,
        fleet: Fleet,
        again: Callable[[Json, Json, str], Awaitable[Json]],
        default_model: str,
    ) -> None:
        self._signer = signer
        self._stored = stored
        self._control_client = control_client
        self._fleet = fleet
        self._again = again
        self._default_model = default_model

    async def of(self, response_id: str) -> Json:
        """The response of an id. Raises RequestRefused if there is none."""
        kept = await self._kept(response_id)
        if kept and not kept.background:
            return await self._told_again(kept)
        held = await self._held("GET", response_id)
        if held and held.status == 200:
            return await self._as_recorded(response_id, held, kept)
        return await self._told_again(kept or await self._kept_by_now(response_id))

    async def cancelled(self, response_id: str) -> Json:
        """The response of an id, which its engine stops to sample. Raises RequestRefused if none is under way."""
        kept = await self._kept(response_id)
        if kept is None and (held := await self._held("POST", response_id, "/cancel")):
            if held.status == 200:
                return held.told
            error = held.told["error"]
            raise _refused(error.get("message"), held.status)
        kept = kept or await self._kept_by_now(response_id)
        if not (kept.whole or kept.background):
            raise _not_found(response_id)
        raise _refused("Cannot cancel a synchronous response.", 400)

    async def streamed(self, response_id: str, starting_after: int | None) -> AsyncIterator[bytes]:
        """The events of a background response that was streamed, those that are still to come too."""
        kept = await self._kept(response_id)
        held = None if kept and not kept.background else await self._held("GET", response_id)
        if held is None:
            await self.of(response_id)  # if there is one at all
            raise _refused(f"Unknown response_id: {response_id}", 400)
        after = "" if starting_after is None else f"&starting_after={starting_after}"
        reply = await held.engine.http.ask("GET", f"{path_of(response_id)}?stream=true{after}")
        blocks = reply.blocks()
        try:
            async with asyncio.timeout(_ENGINE_S):
                first = await anext(blocks, b"")
        except (EngineError, TimeoutError):
            reply.close()
            # vLLM finds out only after it has begun to answer.
            raise _refused(f"Unknown response_id: {response_id}", 400) from None
        return _rest(reply, first, blocks)

    async def _kept(self, response_id: str) -> StoredResponse | None:
        named = self._signer.parse(response_id, TENANT)
        if named is None or named.msg_id != response_id:
            raise _not_found(response_id)
        stored = await asyncio.to_thread(self._stored.get, TENANT, response_id, endpoint=RESPONSES)
        body = orjson.loads(stored.request) if stored else None
        return (
            StoredResponse(stored, body) if stored and isinstance(body, dict) else None
        )  # an imported row may hold anything

    async def _kept_by_now(self, response_id: str) -> StoredResponse:
        """The same, when all has reached the ledger that was acknowledged until now."""
        if not await self._control_client.wait_until_flushed(_PATIENCE_S):
            raise LedgerUnavailable("the database is away; what was acknowledged is safe on disk: ask again later")
        kept = await self._kept(response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept

    async def _as_recorded(self, response_id: str, held: HeldResponse, kept: StoredResponse | None) -> Json:
        """What an engine says. If the response is over, it should be in the ledger before the client knows."""
        deadline = time.monotonic() + _PATIENCE_S
        while kept is None and held.told.get("status") not in UNDER_WAY and time.monotonic() < deadline:
            await self._control_client.wait_until_flushed(_PATIENCE_S)
            kept = await self._kept(response_id)
            if kept is None:
                await asyncio.sleep(_AGAIN_S)
        return as_asked(kept.body, held.told) if kept else held.told

    async def _told_again(self, kept: StoredResponse) -> Json:
        """The response that the ledger has, as it was told; of another one than ours, as much as is known."""
        if not kept.whole:
            raise _not_found(kept.stored.msg_id)
        body, choice = kept.body, kept.stored.choices[0]
        usage = None
        if untranslatable(body) is None:
            prompt, completion = choice.prompt_tokens, choice.completion_tokens
            total = prompt + completion
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        calls = orjson.loads(choice.tool_calls) if choice.tool_calls else None
        said = {"message": {"content": choice.text, "tool_calls": calls}, "finish_reason": choice.finish_reason}
        reply = {"model": body.get("model") or self._default_model, "usage": usage, "choices": [said]}
        return await self._again(body, reply, kept.stored.msg_id)

    async def _held(self, method: str, response_id: str, more: str = "") -> HeldResponse | None:
        """What the engine says that has the response. Raises EngineError if that cannot be known."""
        engines = [each for each in self._fleet.engines if each.state is not EngineState.DOWN]
        path = path_of(response_id) + more
        said = await asyncio.gather(*(_asked(engine, method, path) for engine in engines), return_exceptions=True)
        lost = None
        for each in said:
            if isinstance(each, HeldResponse):
                return each
            if isinstance(each, EngineError | TimeoutError):
                lost = each
            elif each is not None:
                raise each
        if lost is not None:
            raise RequestRefused(
                "an engine that may have it cannot be asked", status=503, code="engine_unavailable", retry_after_s=2.0
            )
        return None


async def _asked(engine: Engine, method: str, path: str) -> HeldResponse | None:
    async with asyncio.timeout(_ENGINE_S):
        reply = await engine.http.ask(method, path)
        try:
            said = await reply.read()
        finally:
            reply.close()
    try:
        told = orjson.loads(said)
    except orjson.JSONDecodeError:
        told = None
    if reply.status == 404:
        return None
    known = isinstance(told, dict) and (reply.status == 200 or isinstance(told.get("error"), dict))
    if not known or reply.status in (401, 403) or reply.status >= 500:
        raise EngineError(f"the engine answered {reply.status}")
    return HeldResponse(engine, reply.status, told)


async def _rest(reply: EngineReply, first: bytes, blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        if first:
            yield first
        async for block in blocks:
            yield block
    finally:
        reply.close()


def add_routes(app: FastAPI) -> None:
    """Add the routes to the app."""

    @app.get(f"{RESPONSES}/{{response_id}}")
    async def retrieved(response_id: str, request: Request, responses: ResponsesOf) -> Response:
        stream, after = _stream_of(request.query_params), _after_of(request.query_params)
        if stream:
            told = await responses.streamed(response_id, after)
            return StreamingResponse(told, media_type="text/event-stream")
        return Response(orjson.dumps(await responses.of(response_id)), media_type="application/json")

    @app.post(f"{RESPONSES}/{{response_id}}/cancel")
    async def cancelled(response_id: str, responses: ResponsesOf) -> Response:
        return Response(orjson.dumps(await responses.cancelled(response_id)), media_type="application/json")


def _responses(request: Request) -> StoredResponses:
    found: StoredResponses = request.app.state.road.responses
    return found


ResponsesOf = Annotated[StoredResponses, Depends(_responses)]


def _stream_of(query: QueryParams) -> bool:
    said = query.get("stream", "false").lower()
    if said not in (*_TRUE, *_FALSE):
        raise RequestRefused("stream must be true or false", code="invalid_type", param="stream")
    return said in _TRUE


def _after_of(query: QueryParams) -> int | None:
    said = query.get("starting_after")
    if said is None:
        return None
    if not (said.isascii() and said.isdigit() and len(said) < 10):
        raise RequestRefused("starting_after must be an integer from 0", code="invalid_type", param="starting_after")
    return int(said)


def _not_found(response_id: str) -> RequestRefused:
    message = f"Response with id '{response_id}' not found."
    return RequestRefused(message, status=404, code="not_found", param="response_id")


def _refused(message: object, status: int) -> RequestRefused:
    return RequestRefused(str(message), status=status, code="invalid_value", param="response_id")
