"""Where requests come in: uvicorn's HTTP/1.1, with a short way for the routes that must cost next to nothing.

A request for a short way never becomes ASGI: no scope is copied, no message passed, no route matched, and a client that
leaves cancels the task that answers it. All others go to the app as ever. What is known here of uvicorn's insides is
known nowhere else.
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

#: Bytes of a request's line and headers beyond which no more of them are read.
_LONGEST_HEAD = 64 << 10

#: What of uvicorn is private and yet used here, with the parameters that it must have.
_PRIVATE = {
    "_start_asgi_task": ("self", "cycle", "app"),
    "_should_upgrade": ("self",),
    "_unset_keepalive_if_required": ("self",),
    "send_400_response": ("self", "msg"),
}

#: The releases that have it, as pyproject.toml says too.
UVICORN = "uvicorn[standard]>=0.53,<0.55"

#: How long a client that is still sending may go on after its answer: closed at once, it might lose the answer.
_LINGER_S = 2.0


def check_uvicorn(protocol: type[Any] = HttpToolsProtocol) -> None:
    """Raise EnvironmentRefused if short ways would not be taken with the installed uvicorn."""
    for name, wanted in _PRIVATE.items():
        method = getattr(protocol, name, None)
        found = tuple(inspect.signature(method).parameters) if method else None
        if found != wanted:
            what = "no longer takes what it took" if found else "is missing"
            raise EnvironmentRefused(
                f"uvicorn {importlib.metadata.version('uvicorn')} is installed, of which {protocol.__name__}.{name} "
                f"{what}: requests to sample would not be answered; pip install '{UVICORN}'"
            )


class RawRequest:
    """One request and the connection that its answer goes to."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._chunked = cycle.scope["http_version"] != "1.0"
        self.path: str = cycle.scope["path"]
        self.started = False
        self.gone = False

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
                    await self._until_whole(max_bytes)
            except TimeoutError:
                cycle.keep_alive = False
                raise RequestRefused("the body did not come in time", status=408, code="body_timeout") from None
        if len(cycle.body) > max_bytes:
            raise self._too_large(max_bytes)
        body, cycle.body = bytes(cycle.body), bytearray()  # else an idle connection would hold it
        return body

    async def _until_whole(self, max_bytes: int) -> None:
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
        self._cycle.keep_alive = not self._cycle.more_body  # what is still coming is nobody's
        return RequestRefused(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer whole."""
        self._finish(b"%bcontent-length: %d\r\n\r\n%b" % (self._head(status, headers), len(body), body))

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer in pieces; one of HTTP/1.0 ends with its connection."""
        framing = b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._cycle.transport.write(self._head(status, headers) + framing)

    def write(self, piece: bytes) -> None:
        """Send a piece, which must not be empty."""
        self._cycle.transport.write(self._framed(piece))

    @property
    def slow(self) -> bool:
        """Whether the client reads more slowly than is written; `drain` waits for it."""
        return bool(self._cycle.flow.write_paused)

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        await self._cycle.flow.drain()

    def end(self, piece: bytes) -> None:
        """Send the last piece, if there is one, and end the answer."""
        said = self._framed(piece) if piece else b""  # an empty one would end it a second time
        self._finish(said + (b"0\r\n\r\n" if self._chunked else b""))

    def break_off(self) -> None:
        """Close the connection in the middle of an answer, so that nobody takes it for whole."""
        if self.slow:  # closed, it would wait until all is read that was written
            self._cycle.transport.abort()
        else:
            self._cycle.transport.close()

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece

    def _head(self, status: int, headers: Headers) -> bytes:
        self.started = self._cycle.response_started = True
        lines = _lines(self._cycle.default_headers, headers)
        return STATUS_LINE[status] + lines + (b"" if self._cycle.keep_alive else b"connection: close\r\n")

    def _finish(self, data: bytes) -> None:
        cycle = self._cycle
        if self.gone or cycle.transport.is_closing():
            return
        cycle.transport.write(data)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive and cycle.more_body:
            asyncio.get_running_loop().call_later(_LINGER_S, cycle.transport.close)
        elif not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


#: Answers a visit. It is cancelled when the client leaves: `visit.gone` tells.
FastRoute = Callable[[RawRequest], Awaitable[None]]


class FastRoutes:
    """An ASGI app, and the short ways past it by method and path."""

    def __init__(self, app: Any, ways: Mapping[tuple[str, str], FastRoute]) -> None:
        self.app = app
        self.ways = ways

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """What has no short way. Its answers, too, are named after their requests."""

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name != _NAME for name, _ in headers):
                    headers.append((_NAME, dict(scope["headers"]).get(_NAME) or b"req_" + uuid.uuid4().hex.encode()))
                message = message | {"headers": headers}
            await send(message)

        await self.app(scope, receive, named if scope["type"] == "http" else send)


_NAME = b"x-request-id"


class FastProtocol(HttpToolsProtocol):
    """One connection. Where `config.app` is a ShortWays, its short ways are taken."""

    _visit: RawRequest | None = None
    _answering: "asyncio.Task[None] | None" = None
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take in what the client sends, but no head without end."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is not HTTP/1.1")
        if self.scope is None or "method" in self.scope:  # it is known when the head is whole
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > _LONGEST_HEAD:
            reason = f"the headers are longer than {_LONGEST_HEAD} bytes"
            self._hang_up(RequestRefused(reason, status=431, code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._hang_up(RequestRefused(msg, code="invalid_http"))

    def _hang_up(self, refusal: RequestRefused) -> None:
        """Close the connection of a request that cannot be read. An answer under way is not written into."""
        answering = self.pipeline or (self.cycle and self.cycle.response_started and not self.cycle.response_complete)
        if not answering and not self.transport.is_closing():
            response = errors.error_response(refusal, str((self.scope or {}).get("path", "")), None)
            lines = _lines(self.server_state.default_headers, response.raw_headers)
            body = bytes(response.body)
            self.transport.write(b"%b%bconnection: close\r\n\r\n%b" % (STATUS_LINE[refusal.status], lines, body))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return True  # asked where the request does: it is not begun then, and `data_received` sees it

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read a request again as if it had not asked for an upgrade, with which the parser would not read its body."""
        if self.scope["method"] == "CONNECT":
            self._hang_up(RequestRefused("CONNECT is not allowed here", status=405, code="method_not_allowed"))
            return
        first = f"{self.scope['method']} ".encode() + self.url + b" HTTP/1.1\r\n"
        headers = _lines([header for header in self.headers if header[0] != b"upgrade"])
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b%b\r\n%b" % (first, headers, rest))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        ways = getattr(self.config.app, "ways", {})
        way = ways.get((cycle.scope["method"], cycle.scope["path"]))
        if way is None:
            super()._start_asgi_task(cycle, app)
            return
        self._visit = RawRequest(cycle)
        self._answering = task = self.loop.create_task(_received(way, self._visit))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what nobody waits for any more."""
        super().connection_lost(exc)
        if self._visit is not None and self._answering is not None and not self._answering.done():
            self._visit.gone = True
            self._answering.cancel()
        self._visit = self._answering = None
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.on_response = _nothing  # which held us, and we it


async def _received(way: FastRoute, visit: RawRequest) -> None:
    try:
        await way(visit)
    except asyncio.CancelledError:
        if not visit.gone:  # the server is told to stop and has waited long enough
            if visit.started:
                visit.break_off()
            else:
                send_error(visit, RequestRefused("the service stops", status=503, code="stopping", retry_after_s=1.0))
            raise
    except Exception as error:
        if visit.started:
            log.exception("answer_broken_off", path=visit.path)
            visit.break_off()
            return
        refusal = errors.refusal_of(error)
        if refusal.code == "internal":
            log.exception("request_failed", path=visit.path)
        send_error(visit, refusal)


def send_error(visit: RawRequest, refusal: RequestRefused) -> None:
    """Answer that a request is refused."""
    send(visit, errors.error_response(refusal, visit.path, visit.header(_NAME)))


def send(visit: RawRequest, response: Response) -> None:
    """Answer with what would have been an ASGI response."""
    headers = [(name, value) for name, value in response.raw_headers if name != b"content-length"]
    visit.answer(response.status_code, headers, bytes(response.body))


def _lines(*headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for several in headers for header in several])


def _nothing() -> None:
    pass
