"""uvicorn's HTTP/1.1 protocol with the bounds that no ASGI app can set. Only this module depends on uvicorn.

It bounds heads and the time that they take, closes idle connections, ignores offers to upgrade, and refuses trailers.
"""

import asyncio
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tuneloop.explorer.http import errors
from tuneloop.explorer.limits import ConnectionLimits
from tuneloop.shared.errors import RequestRefused

#: The most bytes of a request's line and headers together, and of what stands between the chunks of a body.
MAX_HEAD_BYTES = 64 << 10

#: How long a client may go on sending after its last response, which a connection closed at once might lose.
LINGER_S = 2.0


class Http11(HttpToolsProtocol):
    """One connection, within the `connections` of the app that it serves."""

    _answered: Any = None  # the cycle that is being answered, or was last
    _head_complete, _message_complete = False, True
    _refusal: RequestRefused | None = None  # the last answer of this connection, which follows those under way
    _timer: asyncio.TimerHandle | None = None  # until when a head must be complete
    _unread: asyncio.TimerHandle | None = None  # until when the client must have read something
    _lingers = _has_read = False
    _head_bytes = _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is room for it or an idle one can make room."""
        super().connection_made(transport)
        self._limits = getattr(self.config.app, "connections", None) or ConnectionLimits()
        self.app: Any = partial(_answer, self, self.app)
        if len(self.connections) > self._limits.max_connections:
            if not self._limits.idle:
                reason = "there are too many connections; try again in a moment"
                self._refuse(RequestRefused(reason, status=503, code="too_many_connections", retry_after_s=1.0))
                return
            idle = next(iter(self._limits.idle))
            del self._limits.idle[idle]
            idle.transport.abort()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends; refuse what is no request, and a head that is too long."""
        if self._refusal is not None or self._lingers:
            return
        self._unset_keepalive_if_required()
        self._body_bytes, self._has_read = 0, False
        unread: memoryview | None = memoryview(data)
        while unread is not None and self._refusal is None:  # each time round a request that offers an upgrade
            unread = self._parse(unread)
        if self._refusal is not None or self.transport.is_closing():
            return
        if not self._has_read:
            self._head_bytes += len(data)
        elif self._head_complete or self._message_complete:
            self._head_bytes = 0
        else:  # a head has begun in this data; rather too little than too much, where a body came in chunks
            self._head_bytes = max(0, len(data) - data.rfind(b"\r\n\r\n") - 4 - self._body_bytes)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_long())
        elif not (self.pipeline or (self._head_complete and self._is_at_work)):
            self._wait_for_head()

    def _parse(self, data: memoryview) -> memoryview | None:
        """Feed the parser; what is still to be read, where a request offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.scope["method"] == "CONNECT":
                self._refuse(RequestRefused("CONNECT is not allowed here", status=405, code="method_not_allowed"))
                return None
            # Read again without the offer, with which the parser would not read the body.
            headers = _lines([each for each in self.headers if each[0] != b"upgrade"])
            first = b"%b %b HTTP/1.1\r\n" % (self.scope["method"].encode(), self.url)
            self.parser = httptools.HttpRequestParser(self)
            self._parse(memoryview(b"%b%b\r\n" % (first, headers)))
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            ours = error.__context__  # raised by a callback below
            if not isinstance(ours, RequestRefused):
                ours = RequestRefused("this is not HTTP/1.1", code="invalid_http")
            self._refuse(ours)
        return None

    def _should_upgrade(self) -> bool:
        return True  # asked where a request offers an upgrade: it is not begun then; see `_parse`

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._head_complete = self._message_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; after the body it is a trailer, which nobody here has a use for."""
        if self._head_complete:
            raise RequestRefused("trailers are not accepted", code="trailers_not_accepted")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if sum([len(name) + len(value) for name, value in self.headers], len(self.url)) > MAX_HEAD_BYTES:
            raise _too_long()  # all of it came at once
        self._head_complete = self._has_read = True
        self._body_bytes = 0
        self._limits.idle.pop(self, None)
        _cancel(self._timer)
        self._timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._body_bytes += len(body)
        self._has_read = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that nothing more is to come of the request."""
        self._message_complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or answer the next one that has come."""
        if self._lingers:
            self._linger()
        elif self._refusal is not None and not self.pipeline:
            self._refuse_now(self._refusal)
        else:
            super().on_response_complete()
            if not self.pipeline:
                self._limits.idle.setdefault(self)

    def pause_writing(self) -> None:
        """Give the client some time to read on."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who answer requests of it; uvicorn tells the last one alone."""
        super().connection_lost(exc)
        for cycle in (self._answered, self.cycle):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        _cancel(self._timer)
        _cancel(self._unread)
        self._limits.idle.pop(self, None)
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.on_response = _do_nothing  # else the two would hold each other, as would this and its app
        self._answered = self.app = self._timer = self._unread = None

    @property
    def _is_at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._limits.idle.setdefault(self)
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._message_complete:  # no head has begun
            self.transport.abort()
        else:
            self._refuse(RequestRefused("the headers did not come in time", status=408, code="head_timeout"))

    def _refuse(self, error: RequestRefused) -> None:
        """Refuse what is being read, when what came before it is answered, and close the connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        _cancel(self._timer)
        reads_body = self._head_complete and not self._message_complete
        if reads_body and self.pipeline:
            self.pipeline.popleft()[0].response_complete = True
        elif not self.pipeline and (reads_body or not self._is_at_work):
            self._refuse_now(error)

    def _refuse_now(self, error: RequestRefused) -> None:
        if self.transport.is_closing() or (self._is_at_work and self.cycle.response_started):
            self.transport.close()
            return
        response = errors.error_response(error, str((self.scope or {}).get("path", "")), None)
        lines = _lines([*self.server_state.default_headers, *response.raw_headers])
        self.transport.write(
            b"%b%bconnection: close\r\n\r\n%b" % (STATUS_LINE[error.status], lines, bytes(response.body))
        )
        if self._is_at_work or self.scope is None:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close the connection in a moment: its client may be sending still, and would lose what is written to it."""
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


async def _answer(protocol: Http11, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Answer a request by the app; a response that it leaves unfinished breaks off the connection."""
    cycle = protocol._answered = receive.__self__
    if cycle.more_body or scope["http_version"] == "1.0":
        send = partial(_send, protocol, cycle)
    try:
        await app(scope, receive, send)
    finally:
        if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True  # else uvicorn would log that it is unfinished
            protocol.transport.close()


async def _send(protocol: Http11, cycle: Any, message: Any) -> None:
    """Send a message of a response that starts before all of its request has come, or is HTTP/1.0's without chunks."""
    if message["type"] == "http.response.start":
        cycle.keep_alive = cycle.keep_alive and not cycle.more_body
        if cycle.scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
        await cycle.send(message)
        cycle.keep_alive, protocol._lingers = cycle.keep_alive or cycle.more_body, cycle.more_body
        return
    if cycle.scope["http_version"] == "1.0" and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await cycle.send(message)


def _lines(headers: Any) -> bytes:
    return b"".join([b"%b: %b\r\n" % each for each in headers])


def _too_long() -> RequestRefused:
    return RequestRefused(f"the headers are longer than {MAX_HEAD_BYTES} bytes", status=431, code="headers_too_large")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _do_nothing() -> None:
    pass
