"""Reads the conversation that `previous_response_id` continues from the ledger."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import orjson

from tuneloop.explorer.arrivals import Arrivals
from tuneloop.explorer.auth import Caller
from tuneloop.explorer.dialects import responses_request
from tuneloop.explorer.http.bodies import MAX_CONTAINERS, MAX_VALUES, count_structure
from tuneloop.explorer.transcript import ReplyIdSigner
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.reports import Reports

#: Most responses of one conversation; each costs one read of the ledger.
MAX_RESPONSES = 1000

#: Most bytes of all requests and replies of one conversation. The number of JSON values has the limit of a body.
MAX_BYTES = 32 << 20

_FLUSH_TIMEOUT_S = 5.0


class _Size:
    def __init__(self) -> None:
        self._bytes = self._containers = self._commas = self._responses = 0

    def add(self, request: bytes, text: str) -> None:
        containers, commas = count_structure(request)
        self._responses += 1
        self._bytes += len(request) + len(text)
        self._containers += containers
        self._commas += commas
        if self._responses > MAX_RESPONSES:
            raise _too_large(f"it has more than {MAX_RESPONSES} responses")
        if self._bytes > MAX_BYTES:
            raise _too_large(f"it has more than {MAX_BYTES} bytes")
        if self._containers > MAX_CONTAINERS or self._commas > MAX_VALUES:
            raise _too_large(f"it has more than {MAX_CONTAINERS} objects and lists, or {MAX_VALUES} values")


def _too_large(why: str) -> RequestRefused:
    message = f"the conversation is too large to be continued: {why}"
    return RequestRefused(message, code="conversation_too_large", param="previous_response_id")


class Conversations:
    def __init__(
        self,
        signer: ReplyIdSigner,
        wait_until_taken: Callable[[float], Awaitable[bool]],
        reports: Reports,
        arrivals: Arrivals,
    ) -> None:
        self._signer = signer
        self._arrivals = arrivals
        self._wait_until_taken = wait_until_taken
        self._reports = reports

    async def read(self, response_id: str, caller: Caller) -> Sequence[dict[str, Any]]:
        """Return the messages up to a response, and its text. Raises RequestRefused, LedgerUnavailable."""
        flushed = await self._wait_until_taken(_FLUSH_TIMEOUT_S)
        if flushed and (last := self._signer.parse(response_id, caller.tenant)) is not None:
            read = partial(self._reports.reply, caller.tenant, last.msg_id)
            await self._arrivals.find(response_id, caller.tenant, read)
        return await asyncio.to_thread(self._read, response_id, caller.tenant, flushed=flushed)

    def _read(self, response_id: str, tenant: str, *, flushed: bool) -> list[dict[str, Any]]:
        turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        name: object = response_id
        size = _Size()
        while isinstance(name, str):
            reply_id = self._signer.parse(name, tenant)
            reply = self._reports.reply(tenant, reply_id.msg_id) if reply_id else None
            if reply is None and reply_id and not flushed:
                raise LedgerUnavailable(
                    "the database is unavailable; acknowledged data is safe on disk: try again later"
                )
            if reply is None:
                raise RequestRefused(
                    f"Response with id {name!r} not found.", status=404, code="not_found", param="previous_response_id"
                )
            size.add(reply.request, reply.text)
            request = orjson.loads(reply.request)
            output = [{"type": "message", "content": [{"text": reply.text}]}] if reply.text else []
            turns.append((request, {"output": output}))
            name = request.get("previous_response_id")
        messages: list[dict[str, Any]] = []
        for request, response in reversed(turns):
            messages = responses_request.continued_messages(request, response, messages)
        return messages
