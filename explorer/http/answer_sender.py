"""Sends what an app answers, no faster than its client reads it, and not for ever."""

import asyncio
import uuid
from typing import Any

from tuneloop.explorer.http import errors
from tuneloop.explorer.http.connections import PIECE_BYTES, RequestShare, find_share
from tuneloop.explorer.http.raw_request import REQUEST_ID, Headers


class AnswerSender:
    """Sends one answer.

    One of more than a piece counts among what the worker holds until the last piece is written. Where there is no room
    for it, a refusal is sent in its place.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, more: Headers = ()) -> None:
        """Headers `more` go with it, and `x-request-id`."""
        self._scope, self._receive, self._send, self._more = scope, receive, send, more
        self._share = find_share(scope)  # none if it came through another server
        self._start: Any = None
        self._over = False

    async def __call__(self, message: Any) -> None:
        """Take a message of the app."""
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._start = self._with_headers(message)  # sent when it is known whether there is room for the rest
            return
        body = message.get("body", b"")
        if len(body) > PIECE_BYTES and self._share is not None:
            await self._send_large(self._share, message, body)
        else:
            await self._send_start()
            await self._send_in_time(message)

    def _with_headers(self, message: Any) -> Any:
        headers = list(message.get("headers", ()))
        if all(name != REQUEST_ID for name, _ in headers):
            ours = b"req_" + uuid.uuid4().hex.encode()
            headers.append((REQUEST_ID, dict(self._scope["headers"]).get(REQUEST_ID) or ours))
        return {**message, "headers": [*headers, *self._more]}

    async def _send_start(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send_in_time(start)

    async def _send_large(self, share: RequestShare, message: Any, body: bytes) -> None:
        if (refusal := share.hold_answer(len(body))) is not None and self._start is not None:
            self._over = True
            await errors.error_response(refusal, self._scope["path"], None)(self._scope, self._receive, self._send)
            return
        await self._send_start()
        more = message.get("more_body", False)
        for begin in range(0, len(body), PIECE_BYTES):
            end = begin + PIECE_BYTES
            await self._send_in_time({**message, "body": body[begin:end], "more_body": more or end < len(body)})

    async def _send_in_time(self, message: Any) -> None:
        """Send it when most of what came before is read; break off the connection if nothing is for too long."""
        if self._over:
            return
        try:
            async with asyncio.timeout(None if self._share is None else self._share.read_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._over = True
            if self._share is not None:
                self._share.abort()
