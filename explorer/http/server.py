"""uvicorn's HTTP/1.1 protocol with fast routes past ASGI, for the hot path.

A request for a fast route never becomes ASGI: no scope is copied, no message passed, no route matched, and a client
that disconnects cancels the task that answers it. All others go to the app. Only this module depends on uvicorn's
internals.
"""

import asyncio
import importlib.metadata
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httptools
import structlog
from fastapi.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tuneloop.explorer.http import errors
from tuneloop.shared.errors import EnvironmentRefused, RequestRefused

log = structlog.get_logger()

Headers = Sequence[tuple[bytes, bytes]]

#: The most bytes of a request's line and headers together.
_MAX_HEAD_BYTES = 64 << 10

#: uvicorn's private methods that are used here, with the parameters that they must have.
_PRIVATE_METHODS = {
    "_start_asgi_task": ("self", "cycle", "app"),
    "_should_upgrade": ("self",),
    "_unset_keepalive_if_required": ("self",),
    "send_400_response": ("self", "msg"),
}

#: The releases that have them, as in pyproject.toml.
UVICORN = "uvicorn[standard]>=0.53,<0.55"

#: How long a client may go on sending after its response, which a connection closed at once might lose.
_LINGER_S = 2.0


def check_uvicorn(protocol: type[Any] = HttpToolsProtocol) -> None:
    """Raise EnvironmentRefused if fast routes would not work with the installed uvicorn."""
    for name, wanted in _PRIVATE_METHODS.items():
        method = getattr(protocol, name, None)
        found = tuple(inspect.signature(method).parameters) if method else None
        if found != wanted:
            what = "has other parameters" if found else "is missing"
            raise EnvironmentRefused(
                f"uvicorn {importlib.metadata.version('uvicorn')} is installed, whose {protocol.__name__}.{name} "
                f"{what}: requests for replies would not be answered; pip install '{UVICORN}'"
            )


class RawRequest:
    """One request, and the connection that its response goes to."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._chunked = cycle.scope["http_version"] != "1.0"
        self.path: str = cycle.scope["path"]
        self.started = False
        self.client_left = False

    def header(self, name: bytes) -> str | None:
        """The value of a request's header; `name` in lower case."""
        for each, value in self._cycle.scope["headers"]:
            if each == name:
                return str(value, "latin-1")
        return None

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
        """Send a whole response."""
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
        """Wait until the client has read most of what was written."""
        await self._cycle.flow.drain()

    def end_stream(self, chunk: bytes) -> None:
        """Send the last chunk, if there is one, and end the response."""
        last = self._frame(chunk) if chunk else b""  # an empty chunk would end it a second time
        self._finish(last + (b"0\r\n\r\n" if self._chunked else b""))

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
        lines = _header_lines(self._cycle.default_headers, headers)
        return STATUS_LINE[status] + lines + (b"" if self._cycle.keep_alive else b"connection: close\r\n")

    def _finish(self, data: bytes) -> None:
        cycle = self._cycle
        if self.client_left or cycle.transport.is_closing():
            return
        cycle.transport.write(data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive and cycle.more_body:
            asyncio.get_running_loop().call_later(_LINGER_S, cycle.transport.close)
        elif not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


#: Answers a request. It is cancelled when the client disconnects: then `client_left` is set.
FastRoute = Callable[[RawRequest], Awaitable[None]]


class FastRoutes:
    """An ASGI app, and the fast routes past it by method and path."""

    def __init__(self, app: Any, fast_routes: Mapping[tuple[str, str], FastRoute]) -> None:
        self.app = app
        self.fast_routes = fast_routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request without a fast route. Its response, too, gets the x-request-id header."""

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name != _REQUEST_ID for name, _ in headers):
                    headers.append(
                        (_REQUEST_ID, dict(scope["headers"]).get(_REQUEST_ID) or b"req_" + uuid.uuid4().hex.encode())
                    )
                message = message | {"headers": headers}
            await send(message)

        await self.app(scope, receive, send_with_id if scope["type"] == "http" else send)


_REQUEST_ID = b"x-request-id"


class FastProtocol(HttpToolsProtocol):
    """One connection. Where `config.app` is a FastRoutes, its fast routes are used."""

    _raw_request: RawRequest | None = None
    _response_task: "asyncio.Task[None] | None" = None
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends; refuse a head that is too long."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._continue_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is not HTTP/1.1")
        if self.scope is None or "method" in self.scope:  # uvicorn sets it when the head is complete
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            reason = f"the headers are longer than {_MAX_HEAD_BYTES} bytes"
            self._refuse_and_close(RequestRefused(reason, status=431, code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse_and_close(RequestRefused(msg, code="invalid_http"))

    def _refuse_and_close(self, error: RequestRefused) -> None:
        """Refuse a request that cannot be read, and close the connection. A response under way is not written into."""
        responding = self.pipeline or (self.cycle and self.cycle.response_started and not self.cycle.response_complete)
        if not responding and not self.transport.is_closing():
            response = errors.error_response(error, str((self.scope or {}).get("path", "")), None)
            lines = _header_lines(self.server_state.default_headers, response.raw_headers)
            body = bytes(response.body)
            self.transport.write(b"%b%bconnection: close\r\n\r\n%b" % (STATUS_LINE[error.status], lines, body))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return True  # called where the request asks for one: it is not started then; see `data_received`

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """Read a request again as if it had not asked for an upgrade, with which the parser would not read its body."""
        if self.scope["method"] == "CONNECT":
            self._refuse_and_close(RequestRefused("CONNECT is not allowed here", status=405, code="method_not_allowed"))
            return
        first = f"{self.scope['method']} ".encode() + self.url + b" HTTP/1.1\r\n"
        headers = _header_lines([header for header in self.headers if header[0] != b"upgrade"])
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b%b\r\n%b" % (first, headers, rest))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        routes = getattr(self.config.app, "fast_routes", {})
        route = routes.get((cycle.scope["method"], cycle.scope["path"]))
        if route is None:
            super()._start_asgi_task(cycle, app)
            return
        self._raw_request = RawRequest(cycle)
        self._response_task = task = self.loop.create_task(_respond(route, self._raw_request))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the response that no client waits for any more."""
        super().connection_lost(exc)
        if self._raw_request is not None and self._response_task is not None and not self._response_task.done():
            self._raw_request.client_left = True
            self._response_task.cancel()
        self._raw_request = self._response_task = None
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.on_response = _do_nothing  # else the two would hold each other


async def _respond(route: FastRoute, request: RawRequest) -> None:
    try:
        await route(request)
    except asyncio.CancelledError:
        if not request.client_left:  # the server is stopping and has waited long enough
            if request.started:
                request.abort()
            else:
                send_error(
                    request, RequestRefused("the service is stopping", status=503, code="stopping", retry_after_s=1.0)
                )
            raise
    except Exception as error:
        if request.started:
            log.exception("answer_broken_off", path=request.path)
            request.abort()
            return
        refusal = errors.refusal_of(error)
        if refusal.code == "internal":
            log.exception("request_failed", path=request.path)
        send_error(request, refusal)


def send_error(request: RawRequest, error: RequestRefused) -> None:
    """Send the response to a request that is refused."""
    send(request, errors.error_response(error, request.path, request.header(_REQUEST_ID)))


def send(request: RawRequest, response: Response) -> None:
    """Send a response object, outside ASGI."""
    headers = [(name, value) for name, value in response.raw_headers if name != b"content-length"]
    request.respond(response.status_code, headers, bytes(response.body))


def _header_lines(*headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for several in headers for header in several])


def _do_nothing() -> None:
    pass
