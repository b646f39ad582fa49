"""Responses by their ids, from the ledger."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from tuneloop.explorer.arrivals import Arrivals
from tuneloop.explorer.auth import Caller, caller_of
from tuneloop.explorer.control_client import ControlClient
from tuneloop.explorer.dialects.dialect import RESPONSES
from tuneloop.explorer.dialects.responses_request import normalize
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.recording.stored_completions import StoredCompletions

Json = dict[str, Any]

_FLUSH_TIMEOUT_S = 2.0  # a reply that was acknowledged is in the database a few milliseconds later


class StoredResponses:
    """The recorded responses of the callers' tenants."""

    def __init__(
        self,
        *,
        signer: ReplyIdSigner,
        stored: StoredCompletions,
        control_client: ControlClient,
        arrivals: Arrivals,
        rebuild: Callable[[Json, Json, str], Awaitable[Json]],
        default_model: str,
    ) -> None:
        self._signer = signer
        self._stored = stored
        self._control_client = control_client
        self._arrivals = arrivals
        self._rebuild = rebuild
        self._default_model = default_model

    async def get(self, caller: Caller, response_id: str) -> Json:
        """The response of an id. Raises RequestRefused if there is none."""
        reply_id = self._signer.parse(response_id, caller.tenant)
        if reply_id is None or reply_id.msg_id != response_id:
            raise _not_found(response_id)
        find = partial(self._stored.get, caller.tenant, response_id, endpoint=RESPONSES)
        found = await asyncio.to_thread(find)
        if found is None:
            if not await self._control_client.wait_until_taken(_FLUSH_TIMEOUT_S):
                raise LedgerUnavailable(
                    "the database is unavailable; acknowledged data is safe on disk: try again later"
                )
            found = await self._arrivals.find(response_id, caller.tenant, find)
        body = orjson.loads(found.request) if found else None
        # An imported row may hold anything. One that was cut off is no response.
        if not found or not isinstance(body, dict) or all(each.finish_reason is None for each in found.choices):
            raise _not_found(response_id)
        body, choice, usage = normalize(body), found.choices[0], None
        if choice.prompt_tokens:  # the engine's own answers have none
            prompt, completion = choice.prompt_tokens, choice.completion_tokens
            total = prompt + completion
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
        calls = orjson.loads(choice.tool_calls) if choice.tool_calls else None
        choice_fields = {
            "message": {"content": choice.text, "tool_calls": calls},
            "finish_reason": choice.finish_reason,
        }
        reply = {"model": body.get("model") or self._default_model, "usage": usage, "choices": [choice_fields]}
        return await self._rebuild(body, reply, response_id)


def add_routes(app: FastAPI) -> None:
    @app.get(f"{RESPONSES}/{{response_id}}")
    async def retrieve(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("0", "false"):
            message = "a stored response is not streamed: read it without `stream`"
            raise RequestRefused(message, code="invalid_value", param="stream")
        responses: StoredResponses = request.app.state.services.responses
        found = await responses.get(caller_of(request.scope), response_id)
        return Response(orjson.dumps(found), media_type="application/json")


def _not_found(response_id: str) -> RequestRefused:
    message = f"Response with id '{response_id}' not found."
    return RequestRefused(message, status=404, code="not_found", param="response_id")
