"""One request for a fast route: its head, its body, and the connection that its response goes to."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tuneloop.explorer.http import errors, run_prefix
from tuneloop.explorer.http.caller import Caller, caller_of
from tuneloop.explorer.http.connections import PIECE_BYTES, RequestShare, share_of
from tuneloop.explorer.http.run_prefix import RunBinding
from tuneloop.shared.errors import RequestRefused

Headers = Sequence[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"

#: How long a client may go on sending after its response, which a connection closed at once might lose.
LINGER_S = 2.0


class RawRequest:
    """One request, and the connection that its response goes to."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._chunked = cycle.scope["http_version"] != "1.0"
        self.path: str = cycle.scope["path"]
        self.started = False
        self.client_left = False
        self._rest = b""

    def header(self, name: bytes) -> str | None:
        """The value of a request's header; `name` in lower case."""
        for each, value in self._cycle.scope["headers"]:
            if each == name:
                return str(value, "latin-1")
        return None

    def run(self) -> RunBinding | None:
        """The run that its path binds it to, if it does. Raises RequestRefused for a broken token."""
        return run_prefix.binding_of(self._cycle.scope)

    @property
    def caller(self) -> Caller:
        """Who sends it."""
        return caller_of(self._cycle.scope)

    @property
    def share(self) -> RequestShare:
        """What it takes of the bounds."""
        return share_of(self._cycle.scope)

    def hold(self, size: int) -> None:
        """Count bytes that were fetched for it as if they had come in its body. Raises RequestRefused."""
        if (refusal := self.share.hold(size)) is not None:
            raise refusal

    def hold_answer(self, answer: bytes) -> bytes:
        """An answer, counted until its client has read it if it is large. Raises RequestRefused."""
        if len(answer) > PIECE_BYTES and (refusal := self.share.hold_answer(len(answer))) is not None:
            raise refusal
        return answer

    def leave_body(self) -> None:
        """Read no more of the body; if more of it is to come, the connection ends with the response."""
        self._cycle.body = bytearray()
        self._cycle.keep_alive = self._cycle.keep_alive and not self._cycle.more_body

    async def hold_back(self, seconds: float) -> None:
        """Read nothing from the client for so long."""
        flow = self._cycle.flow
        flow.pause_reading()
        await asyncio.sleep(seconds)
        flow.resume_reading()

    async def body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises RequestRefused if it is too large, or does not come within `timeout_s`."""
        cycle = self._cycle
        if cycle.more_body:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._read_body(max_bytes)
            except TimeoutError:
                cycle.keep_alive = False
                raise RequestRefused("the body did not come in time", status=408, code="body_timeout") from None
        if len(cycle.body) > max_bytes:
            raise self._too_large(max_bytes)
        body, cycle.body = bytes(cycle.body), bytearray()  # else an idle connection would hold it
        return body

    async def _read_body(self, max_bytes: int) -> None:
        cycle = self._cycle
        if int(self.header(b"content-length") or 0) > max_bytes:
            raise self._too_large(max_bytes)
        while cycle.more_body and len(cycle.body) <= max_bytes:
            if cycle.waiting_for_100_continue:
                cycle.waiting_for_100_continue = False
                cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.flow.resume_reading()
            await cycle.message_event.wait()
            cycle.message_event.clear()

    def _too_large(self, max_bytes: int) -> RequestRefused:
        self._cycle.body = bytearray()
        self._cycle.keep_alive = not self._cycle.more_body  # the rest of the body is not read
        return RequestRefused(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response; `send_rest` sends the rest of a large one."""
        self._finish(b"%bcontent-length: %d\r\n\r\n%b" % (self._head(status, headers), len(body), body))

    def start_stream(self, status: int, headers: Headers) -> None:
        """Begin a streamed response; with HTTP/1.0 it ends with its connection."""
        framing = b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._cycle.transport.write(self._head(status, headers) + framing)

    def write(self, chunk: bytes) -> None:
        """Send a chunk, which must not be empty."""
        self._cycle.transport.write(self._frame(chunk))

    @property
    def client_is_slow(self) -> bool:
        """Whether the client reads more slowly than is written; `drain` waits for it."""
        return bool(self._cycle.flow.write_paused)

    async def drain(self) -> None:
        """Wait until the client has read most of what was written; one that reads nothing for too long is left."""
        if not self.client_is_slow:
            return
        try:
            async with asyncio.timeout(self.share.read_timeout_s):
                await self._cycle.flow.drain()
        except TimeoutError:
            self.share.abort()
            # Until it is cancelled, as where a client leaves by itself.
            await asyncio.get_running_loop().create_future()

    def end_stream(self, chunk: bytes) -> None:
        """Send the last chunk, if there is one, and end the response; `send_rest` sends the rest of a large one."""
        last = self._frame(chunk) if chunk else b""  # an empty chunk would end it a second time
        self._finish(last + (b"0\r\n\r\n" if self._chunked else b""))

    async def send_rest(self) -> None:
        """Send what is left of the response, as its client reads it."""
        data, self._rest = self._rest, b""
        if not data:
            return
        end = len(data) - len(data) % PIECE_BYTES
        for begin in range(0, end, PIECE_BYTES):
            self._cycle.transport.write(data[begin : begin + PIECE_BYTES])
            await self.drain()
        self._finish(data[end:])

    def abort(self) -> None:
        """Close the connection in the middle of a response, so that it is not taken for whole."""
        if self.client_is_slow:  # `close` would wait until the client has read all that was written
            self._cycle.transport.abort()
        else:
            self._cycle.transport.close()

    def _frame(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk

    def _head(self, status: int, headers: Headers) -> bytes:
        self.started = self._cycle.response_started = True
        lines = header_lines(self._cycle.default_headers, headers)
        return STATUS_LINE[status] + lines + (b"" if self._cycle.keep_alive else b"connection: close\r\n")

    def _finish(self, data: bytes) -> None:
        cycle = self._cycle
        if self.client_left or cycle.transport.is_closing():
            return
        if len(data) > PIECE_BYTES:
            self._rest = data
            return
        cycle.transport.write(data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive and cycle.more_body:
            asyncio.get_running_loop().call_later(LINGER_S, cycle.transport.close)
        elif not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


#: Answers a request. It is cancelled when the client disconnects: then `client_left` is set.
FastRoute = Callable[[RawRequest], Awaitable[None]]


def send_error(request: RawRequest, error: RequestRefused, more: Headers = ()) -> None:
    """Send the response to a request that is refused, with some more headers."""
    send(request, errors.error_response(error, request.path, request.header(REQUEST_ID)), more)


def send(request: RawRequest, response: Response, more: Headers = ()) -> None:
    """Send a response object, outside ASGI."""
    headers = [(name, value) for name, value in response.raw_headers if name != b"content-length"] + [*more]
    request.respond(response.status_code, headers, bytes(response.body))


def header_lines(*headers: Headers) -> bytes:
    """Headers as they are sent."""
    return b"".join([b"%b: %b\r\n" % header for several in headers for header in several])
