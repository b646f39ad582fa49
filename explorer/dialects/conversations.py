"""Finds the conversation that a response continues, in what was kept of it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from tuneloop.explorer.capture.control_client import ControlClient
from tuneloop.explorer.capture.reply_id import TENANT, ReplyIdSigner
from tuneloop.explorer.dialects import responses_request
from tuneloop.shared.errors import LedgerUnavailable, RequestRefused
from tuneloop.shared.ledger.reports import Reports

#: Longer conversations are refused: each response in them is looked up.
LONGEST = 1000

_PATIENCE_S = 5.0


class Conversations:
    """The conversations that ended in a response of ours."""

    def __init__(self, signer: ReplyIdSigner, *, control_client: ControlClient, reports: Reports) -> None:
        self._signer = signer
        self._control_client = control_client
        self._reports = reports

    async def of(self, response_id: str) -> Sequence[dict[str, Any]]:
        """The chat messages up to the response, and what it said. Raises RequestRefused if it was not kept.

        Raises LedgerUnavailable while that cannot be known: it may be on its way to a database that is away.
        """
        all_there = await self._control_client.wait_until_flushed(_PATIENCE_S)
        return await asyncio.to_thread(self._read, response_id, all_there=all_there)

    def _read(self, response_id: str, *, all_there: bool) -> list[dict[str, Any]]:
        turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        name: object = response_id
        while isinstance(name, str):
            named = self._signer.parse(name, TENANT)
            said = self._reports.reply(TENANT, named.msg_id) if named else None
            if said is None and named and not all_there:
                raise LedgerUnavailable("the database is away; what was acknowledged is safe on disk: ask again later")
            if said is None:
                raise RequestRefused(
                    f"Response with id {name!r} not found.", status=404, code="not_found", param="previous_response_id"
                )
            if len(turns) >= LONGEST:
                raise RequestRefused(
                    f"the conversation has more than {LONGEST} responses", param="previous_response_id"
                )
            request = orjson.loads(said.request)
            turns.append((request, _response(said.text)))
            name = request.get("previous_response_id")
        messages: list[dict[str, Any]] = []
        for request, reply in reversed(turns):
            messages = responses_request.conversation(request, reply, messages)
        return messages


def _response(text: str) -> dict[str, Any]:
    """As much of a response as a conversation goes on from."""
    return {"output": [{"type": "message", "content": [{"text": text}]}] if text else []}
