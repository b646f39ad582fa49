"""uvicorn's HTTP/1.1 protocol with fast routes past ASGI, for the hot path.

A request for a fast route never becomes ASGI: no scope is copied, no message passed, no route matched, and a client
that disconnects cancels the task that answers it. All others go to the app. Only this module depends on uvicorn's
internals.
"""

import asyncio
import importlib.metadata
import inspect
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tuneloop.explorer.http import errors, run_prefix
from tuneloop.explorer.http.answer_sender import AnswerSender
from tuneloop.explorer.http.caller import Caller, EntryGate, find_caller, set_caller
from tuneloop.explorer.http.connections import (
    ConnectionLimits,
    ConnectionWatch,
    HeadBytes,
    RequestShare,
    open_share,
    share_of,
)
from tuneloop.explorer.http.cors import CrossOrigin
from tuneloop.explorer.http.raw_request import (
    LINGER_S,
    FastRoute,
    Headers,
    RawRequest,
    header_lines,
    send_error,
)
from tuneloop.shared.errors import EnvironmentRefused, RequestRefused

log = structlog.get_logger()

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


class FastRoutes:
    """An ASGI app, the fast routes past it by method and path, the bounds of the connections to them, and their gate.

    Without a gate everybody may come in, with no scope.
    """

    def __init__(
        self,
        app: Any,
        fast_routes: Mapping[tuple[str, str], FastRoute],
        limits: ConnectionLimits | None = None,
        gate: EntryGate | None = None,
        cross_origin: CrossOrigin | None = None,
    ) -> None:
        self.app = app
        self.fast_routes = fast_routes
        self.limits = limits or ConnectionLimits()
        self._gate = gate
        self.cross_origin = cross_origin or CrossOrigin()

    def admit(self, scope: MutableMapping[str, Any]) -> Caller:
        """Who sends a request. Its scope says so from now on, and its path has no prefix. Raises RequestRefused."""
        if self._gate is not None:
            caller = self._gate.admit(scope)
        else:
            caller = Caller()
            run_prefix.strip_prefix(scope)
        set_caller(scope, caller)
        return caller

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request without a fast route. Its response, too, gets the x-request-id header."""
        try:
            if scope["type"] == "http":
                if find_caller(scope) is None:  # it came through another server
                    self.admit(scope)
                run_prefix.binding_of(scope)
        except RequestRefused as error:
            response = errors.error_response(error, scope["path"], None)
            await response(scope, receive, send)
            return
        if scope["type"] == "http":
            send = AnswerSender(scope, receive, send, self.cross_origin.headers(scope))
        await self.app(scope, receive, send)


class FastProtocol(HttpToolsProtocol):
    """One connection. Where `config.app` is a FastRoutes, its fast routes and limits are used."""

    _raw_request: RawRequest | None = None
    _response_task: "asyncio.Task[None] | None" = None
    _head_complete = False
    _message_complete = True
    _refusal: RequestRefused | None = None
    _last: RequestRefused | None = None
    _watch: ConnectionWatch
    _answered: Any = None  # the cycle of uvicorn that is being answered, or was last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is room for it or an idle one can make room."""
        super().connection_made(transport)
        limits = getattr(self.config.app, "limits", None) or ConnectionLimits()
        self._watch = ConnectionWatch(limits, self._refuse_and_close, transport.abort)
        self._head = HeadBytes()
        if limits.make_room(len(self.connections)):
            self._watch.wait_for_head(begun=False)
            return
        self._refuse_and_close(_too_many())

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends; refuse what is no request, and a head that is too long."""
        if self._last is not None:
            return
        self._unset_keepalive_if_required()
        unread: memoryview | None = memoryview(data)
        while unread is not None:  # each time round a request that asks for an upgrade
            unread = self._parse(unread)
        if self.transport.is_closing() or self._last is not None:
            return
        if self._head.count(data, is_read=self._reads_framing()) > _MAX_HEAD_BYTES:
            self._refuse_and_close(_too_long())
        else:
            self._wait_for_the_rest()

    def _parse(self, data: memoryview) -> memoryview | None:
        """Feed the parser; what is still to be read, where a request asked for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._continue_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse_and_close(self._refusal or RequestRefused("this is not HTTP/1.1", code="invalid_http"))
        return None

    def _reads_framing(self) -> bool:
        """Whether a head is being read, or what stands between the chunks of a body and after them."""
        return self.scope is not None and ("method" not in self.scope or not self._message_complete)

    def _wait_for_the_rest(self) -> None:
        if self.pipeline:  # the last one's body is read when its turn comes
            self._watch.wait_for_nothing()
        elif self.cycle is not None and not self.cycle.response_complete and self._head_complete:
            if self._message_complete:
                self._watch.wait_for_nothing()
            else:
                self._watch.wait_for_body()
        else:
            self._watch.wait_for_head(begun=not self._head_complete and not self._message_complete)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        open_share(self.scope, self._watch.limits, self.transport.abort, getattr(self._answered, "scope", None))
        self._head_complete = self._message_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; after the body it is a trailer, which nobody here has a use for."""
        if self._head_complete:
            self._refuse_here(RequestRefused("trailers are not accepted", code="trailers_not_accepted"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if sum([len(name) + len(value) for name, value in self.headers], len(self.url)) > _MAX_HEAD_BYTES:
            self._refuse_here(_too_long())  # all of it came at once
        self._head_complete, self._head.of_body = True, 0
        self._watch.begin_request()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._head.of_body += len(body)
        if (refusal := share_of(self.scope).hold(len(body))) is not None:
            self._refuse_here(refusal)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that nothing more is to come of the request."""
        self._message_complete = self._head.message_ended = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or answer the next one that has come."""
        self._watch.end_request()
        if self._answered is not None:
            share_of(self._answered.scope).end()
        if self._last is not None and not self.pipeline:
            self._refuse_last(self._last)
        else:
            super().on_response_complete()

    def _refuse_here(self, refusal: RequestRefused) -> None:
        """Refuse the request from within a callback of the parser."""
        self._refusal = refusal
        raise refusal

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse_and_close(RequestRefused(msg, code="invalid_http"))

    def _refuse_and_close(self, error: RequestRefused) -> None:
        """Refuse what is being read, when what came before it is answered, and close the connection."""
        if self._last is not None or self.transport.is_closing():
            return
        self._last = error
        self._watch.wait_for_nothing()
        reads_body = self._head_complete and not self._message_complete
        if reads_body and self.pipeline:
            refused, _ = self.pipeline.popleft()
            refused.response_complete = True
            share_of(refused.scope).end()
        elif not self.pipeline and (reads_body or self.cycle is None or self.cycle.response_complete):
            self._refuse_last(error)

    def _refuse_last(self, error: RequestRefused) -> None:
        """Send a refusal, unless a response is under way, and close the connection."""
        at_work = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or (at_work and self.cycle.response_started):
            self.transport.close()
            return
        self.transport.write(_refusal(error, self.scope or {}, self.server_state.default_headers))
        if at_work or self.scope is None:
            self.transport.close()
        else:  # the client may be sending still, and would lose what is written to it
            self._watch.wait_for_refusal()
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    def _should_upgrade(self) -> bool:
        return True  # called where the request asks for one: it is not started then; see `data_received`

    def _continue_without_upgrade(self, rest: memoryview) -> memoryview | None:
        """Read a request again as if it had not asked for an upgrade, with which the parser would not read its body.

        The rest is still to be read.
        """
        if self.scope["method"] == "CONNECT":
            self._refuse_and_close(RequestRefused("CONNECT is not allowed here", status=405, code="method_not_allowed"))
            return None
        first = f"{self.scope['method']} ".encode() + self.url + b" HTTP/1.1\r\n"
        headers = header_lines([header for header in self.headers if header[0] != b"upgrade"])
        self.parser = httptools.HttpRequestParser(self)
        self._parse(memoryview(b"%b%b\r\n" % (first, headers)))
        return rest

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        share, self._answered = share_of(cycle.scope), cycle
        admitted, scope, route = self.config.app, cycle.scope, None
        if isinstance(admitted, FastRoutes):
            try:
                share.begin(admitted.admit(scope))
            except RequestRefused as error:
                if error.held_s:
                    self._watch.wait_for_refusal()
                self._respond(cycle, partial(_refuse, error, admitted.cross_origin.headers(scope)), share)
                return
            route = admitted.fast_routes.get((scope["method"], scope["path"]))
        if route is None:
            super()._start_asgi_task(cycle, partial(_answer, app, share))
        else:
            self._respond(cycle, route, share)

    def _respond(self, cycle: Any, route: FastRoute, share: RequestShare) -> None:
        self._raw_request = RawRequest(cycle)
        self._response_task = task = self.loop.create_task(_respond(route, self._raw_request, share))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without another request, whether or not its client has read the last answer."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the response that no client waits for any more."""
        super().connection_lost(exc)
        self._watch.close()
        if self._raw_request is not None and self._response_task is not None and not self._response_task.done():
            self._raw_request.client_left = True
            self._response_task.cancel()
        _disconnect(self._answered)
        self._raw_request = self._response_task = self._answered = None
        for never_begun, _ in self.pipeline:
            share_of(never_begun.scope).end()
        self.pipeline.clear()
        if self.cycle is not None:
            self.cycle.on_response = _do_nothing  # else the two would hold each other


def _disconnect(cycle: Any) -> None:
    """Tell who answers that nobody reads it; uvicorn tells the last one alone that was pipelined on the connection."""
    if cycle is not None:
        cycle.disconnected = True
        cycle.message_event.set()


async def _refuse(error: RequestRefused, more: Headers, request: RawRequest) -> None:
    """Refuse a request by its head; its body is not waited for."""
    if error.held_s:
        await request.hold_back(error.held_s)
    request.leave_body()
    send_error(request, error, more)


def _refusal(error: RequestRefused, scope: Mapping[str, Any], more: Headers) -> bytes:
    """The last response on a connection."""
    response = errors.error_response(error, str(scope.get("path", "")), None)
    lines = header_lines(more, response.raw_headers)
    return b"%b%bconnection: close\r\n\r\n%b" % (STATUS_LINE[error.status], lines, bytes(response.body))


def _too_many() -> RequestRefused:
    reason = "there are too many connections; try again in a moment"
    return RequestRefused(reason, status=503, code="too_many_connections", retry_after_s=1.0)


def _too_long() -> RequestRefused:
    return RequestRefused(f"the headers are longer than {_MAX_HEAD_BYTES} bytes", status=431, code="headers_too_large")


async def _answer(app: Any, share: RequestShare, scope: Any, receive: Any, send: Any) -> None:
    """Answer through ASGI, where the app goes on when its client has left."""
    try:
        await share.take_turn()
        await app(scope, receive, send)
    finally:
        share.end()


async def _respond(route: FastRoute, request: RawRequest, share: RequestShare) -> None:
    try:
        await request.drain()  # what was answered before it on its connection
        await share.take_turn()
        await _answer_or_refuse(route, request)
        await request.send_rest()
    except asyncio.CancelledError:
        if not request.client_left:  # the server is stopping and has waited long enough
            if request.started:
                request.abort()
            else:
                send_error(
                    request, RequestRefused("the service is stopping", status=503, code="stopping", retry_after_s=1.0)
                )
            raise
    finally:
        share.end()


async def _answer_or_refuse(route: FastRoute, request: RawRequest) -> None:
    try:
        await route(request)
    except Exception as error:
        if request.started:
            log.exception("answer_broken_off", path=request.path)
            request.abort()
            return
        refusal = errors.refusal_of(error)
        if refusal.code == "internal":
            log.exception("request_failed", path=request.path)
        send_error(request, refusal)


def _do_nothing() -> None:
    pass
