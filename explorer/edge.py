"""The edge of a worker: an HTTP/1.1 protocol with limits that no ASGI app can set, and the app that admits requests.

The protocol extends uvicorn's; no other module depends on it. It limits the size and the time of heads, closes idle
connections, ignores offers to upgrade, and refuses trailers.

The app applies the limits and dispatches requests. Requests for replies bypass FastAPI, whose overhead exceeds all
other work on them.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import httptools
import structlog
from fastapi.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tuneloop.explorer.auth import SCOPE_KEY, Caller, CrossOrigin, Gatekeeper, RunBinding, binding_of
from tuneloop.explorer.http import errors
from tuneloop.explorer.http.bodies import read_body
from tuneloop.explorer.http.encodings import decode_body
from tuneloop.explorer.limits import METER_KEY, PIECE_BYTES, BodyLimits, ConnectionLimits, RequestMeter
from tuneloop.shared.errors import RequestRefused

log = structlog.get_logger()

#: Most bytes of a request's line and headers together, and of the data between two chunks of a body.
MAX_HEAD_BYTES = 64 << 10

#: Seconds for which a refused client may continue to send. A connection that is closed at once may lose the response.
LINGER_S = 2.0

#: Proxies cut a response that is silent for 30 to 60 seconds. A stream is silent for at most twice this interval.
KEEP_ALIVE_S = 15.0


class Http11(HttpToolsProtocol):
    """One connection, within the `connections` of the app that it serves."""

    _answered: Any = None  # the cycle of the current or the last request
    _head_complete, _message_complete = False, True
    _refusal: RequestRefused | None = None  # the last response of this connection, sent after those in progress
    _timer: asyncio.TimerHandle | None = None  # deadline of an incomplete head
    _unread: asyncio.TimerHandle | None = None  # deadline for the client to read
    _lingers = _has_read = False
    _head_bytes = _body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits = getattr(self.config.app, "connections", None) or ConnectionLimits()
        self.app: Any = partial(_run_app, self, self.app)
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
        """Parse received data; refuse malformed requests and heads that are too long."""
        if self._refusal is not None or self._lingers:
            return
        self._unset_keepalive_if_required()
        self._body_bytes, self._has_read = 0, False
        unread: memoryview | None = memoryview(data)
        while unread is not None and self._refusal is None:  # each pass handles one request that offers an upgrade
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
        """Feed the parser. Returns the unparsed rest if a request offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.scope["method"] == "CONNECT":
                self._refuse(RequestRefused("CONNECT is not allowed here", status=405, code="method_not_allowed"))
                return None
            # Parse the head again without the offer: with it the parser would skip the body.
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
        super().on_message_begin()
        self._head_complete = self._message_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            raise RequestRefused("trailers are not accepted", code="trailers_not_accepted")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if sum([len(name) + len(value) for name, value in self.headers], len(self.url)) > MAX_HEAD_BYTES:
            raise _too_long()  # all of it came at once
        self._head_complete = self._has_read = True
        self._body_bytes = 0
        self._limits.idle.pop(self, None)
        _cancel(self._timer)
        self._timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._has_read = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._message_complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingers:
            self._linger()
        elif self._refusal is not None and not self.pipeline:
            self._refuse_now(self._refusal)
        else:
            super().on_response_complete()
            if not self.pipeline:
                self._limits.idle.setdefault(self)

    def pause_writing(self) -> None:
        """Start the client's deadline to read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every cycle of the connection; uvicorn notifies the last one only."""
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
            self.cycle.on_response = _do_nothing  # breaks the reference cycles of protocol, request cycle and app
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
        """Refuse the current request after the responses before it, then close the connection."""
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
        """Close the connection after LINGER_S: a client that is still sending would lose the response."""
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


async def _run_app(protocol: Http11, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the app for a request. A response that the app leaves unfinished aborts the connection."""
    cycle = protocol._answered = receive.__self__
    if cycle.more_body or scope["http_version"] == "1.0":
        send = partial(_send, protocol, cycle)
    try:
        await app(scope, receive, send)
    finally:
        if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True  # otherwise uvicorn would log the unfinished response
            protocol.transport.close()


async def _send(protocol: Http11, cycle: Any, message: Any) -> None:
    """Send a message of a response that starts before its request is complete, or to HTTP/1.0 without chunks."""
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


Headers = Sequence[tuple[bytes, bytes]]

_REQUEST_ID = b"x-request-id"


class ClientRequest:
    """A client's request over ASGI: head, body and sender; and the response to it."""

    def __init__(
        self, scope: Any, receive: Any, send: Any, *, caller: Caller, meter: RequestMeter, more: Headers
    ) -> None:
        self._scope, self._receive, self._send, self._more = scope, receive, send, more
        self.path: str = scope["path"]
        self.run: RunBinding | None = binding_of(scope)
        self.caller, self.meter = caller, meter
        self.started = self.client_left = False
        self._unsent: _Suspended | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_silent = False

    def header(self, name: bytes) -> str | None:
        return next((str(value, "latin-1") for each, value in self._scope["headers"] if each == name), None)

    async def body(self, max_bytes: int) -> bytes:
        """Read the whole body. A disconnect of the client cancels the reader. Raises RequestRefused."""
        body = await read_body(self.meter.receiver(self._receive), self.header(b"content-length"), max_bytes)
        self._watching = asyncio.create_task(self._watch(asyncio.current_task()))
        return body

    async def _watch(self, answering: "asyncio.Task[Any] | None") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        if answering is not None:
            answering.cancel()

    def stop_watching(self) -> None:
        _cancel(self._timer)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # breaks a reference cycle

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await _send_body(self._send, body, more_body=False)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._more]})

    def keep_alive(self, headers: Headers, event: bytes) -> None:
        """Send `event` in each silent interval; start the response first if necessary."""
        self._is_silent = True

        def fill_silence() -> None:
            if self._is_silent and self._unsent is None:  # no event for a client that reads too slowly
                start = {"type": "http.response.start", "status": 200, "headers": [*headers, *self._more]}
                self.started = self.started or self._send_now(start) is None
                if self.started:
                    self._send_now({"type": "http.response.body", "body": event, "more_body": True})
            self.keep_alive(headers, event)

        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, fill_silence)

    def write(self, chunk: bytes) -> bool:
        """Send a chunk without a task. Returns False if the client reads too slowly; then `drain` sends the chunk."""
        self._is_silent = False
        self._unsent = self._send_now({"type": "http.response.body", "body": chunk, "more_body": True})
        return self._unsent is None

    def _send_now(self, message: Any) -> "_Suspended | None":
        """Send a message. Returns the suspended send if the client reads too slowly."""
        sending = self._send(message).__await__()
        try:
            return _Suspended(sending, next(sending))
        except StopIteration:
            return None

    @property
    def client_is_slow(self) -> bool:
        return self._unsent is not None

    async def drain(self) -> None:
        """Send the pending chunk when the client has read most of the earlier data."""
        if self._unsent is not None:
            await self._unsent
            self._unsent = None

    async def end_stream(self, chunk: bytes) -> None:
        _cancel(self._timer)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def refuse(self, error: RequestRefused) -> None:
        response = errors.error_response(error, self.path, self.header(_REQUEST_ID))
        response.raw_headers += self._more
        self.started = True
        await response(self._scope, self._receive, self._send)


class _Suspended:
    """Continues an awaitable that started outside a task; waits for the future that it has yielded."""

    def __init__(self, sending: Generator[Any, Any, Any], waits_for: Any) -> None:
        self._sending, self._waits_for = sending, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        yield from self._sending


#: Answers a request for a reply. A disconnect of the client cancels it.
SamplingRoute = Callable[[ClientRequest], Awaitable[None]]


class Edge:
    """The ASGI app. `routes` answer requests for replies, `app` all others. Without a gate it admits every request."""

    def __init__(
        self,
        app: Any,
        routes: Mapping[str, SamplingRoute],
        *,
        limits: BodyLimits | None = None,
        connections: ConnectionLimits | None = None,
        gate: Gatekeeper | None = None,
        cross_origin: CrossOrigin | None = None,
    ) -> None:
        self.app, self.routes = app, routes
        self.limits, self.connections = limits or BodyLimits(), connections or ConnectionLimits()
        self._gate, self._cross_origin = gate, cross_origin or CrossOrigin()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or open and close the services."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if encodings := [value for name, value in scope["headers"] if name == b"content-encoding"]:
            receive = decode_body(receive, encodings)
        try:
            caller = Caller() if self._gate is None else self._gate.admit(scope)
            meter = RequestMeter(self.limits, caller.meter)
        except RequestRefused as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            route = self.routes.get(scope["path"]) if scope["method"] == "POST" else None
            more = self._cross_origin.headers(scope)
            if route is not None:
                await _answer(route, ClientRequest(scope, receive, send, caller=caller, meter=meter, more=more))
            elif self._cross_origin.is_preflight(scope):
                response = Response(status_code=204)
                response.raw_headers += [*more, (_REQUEST_ID, b"req_" + uuid.uuid4().hex.encode())]
                await response(scope, receive, send)
            else:
                binding_of(scope)
                scope[SCOPE_KEY], scope[METER_KEY] = caller, meter
                answer = _Answer(scope, receive, send, meter=meter, more=more)
                await self.app(scope, meter.receiver(receive), answer)
        except RequestRefused as error:  # for the token of a run
            await self._refuse(error, scope, receive, send)
        finally:
            meter.release()

    async def _refuse(self, error: RequestRefused, scope: Any, receive: Any, send: Any) -> None:
        name = next((str(value, "latin-1") for each, value in scope["headers"] if each == _REQUEST_ID), None)
        response = errors.error_response(error, scope["path"], name)
        response.raw_headers += self._cross_origin.headers(scope)
        await response(scope, receive, send)


async def _answer(route: SamplingRoute, request: ClientRequest) -> None:
    """Answer a request for a reply; abort the connection if the response is unfinished."""
    try:
        await route(request)
    except asyncio.CancelledError:
        if not (request.client_left or request.started):  # the server stops and its grace period has ended
            request.stop_watching()
            await request.refuse(
                RequestRefused("the service is stopping", status=503, code="stopping", retry_after_s=1.0)
            )
    except Exception as error:
        request.stop_watching()
        if request.started:
            log.exception("answer_broken_off", path=request.path)
            return
        refusal = errors.refusal_of(error)
        if refusal.code == "internal":
            log.exception("request_failed", path=request.path)
        await request.refuse(refusal)
    finally:
        request.stop_watching()


class _Answer:
    """Sends a response of FastAPI with `x-request-id`, at the speed at which its client reads.

    A large response is held until its last piece is sent. Without room for it, a refusal is sent instead.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, *, meter: RequestMeter, more: Headers) -> None:
        self._scope, self._receive, self._send, self._meter, self._more = scope, receive, send, meter, more
        self._start: Any = None
        self._is_over = False

    async def __call__(self, message: Any) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            if all(name != _REQUEST_ID for name, _ in headers):
                own = b"req_" + uuid.uuid4().hex.encode()
                headers.append((_REQUEST_ID, dict(self._scope["headers"]).get(_REQUEST_ID) or own))
            self._start = {**message, "headers": [*headers, *self._more]}
            return
        body = message.get("body", b"")
        if self._start is not None:
            try:
                self._meter.hold(len(body) if len(body) > PIECE_BYTES else 0)
            except RequestRefused as refusal:
                self._is_over = True
                await errors.error_response(refusal, self._scope["path"], None)(self._scope, self._receive, self._send)
                return
            start, self._start = self._start, None
            await self._send(start)
        await _send_body(self._send, body, more_body=message.get("more_body", False))


async def _send_body(send: Any, body: bytes, *, more_body: bool) -> None:
    for begin in range(0, len(body) or 1, PIECE_BYTES):
        end = begin + PIECE_BYTES
        piece = body if len(body) <= PIECE_BYTES else body[begin:end]
        await send({"type": "http.response.body", "body": piece, "more_body": more_body or end < len(body)})
