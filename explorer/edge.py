"""The ASGI app of a worker: lets a request in, holds it to the limits, and has it answered.

Requests for replies are answered past FastAPI, which costs more than all that is done for them. It has all others.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

import structlog

from tuneloop.explorer.auth import SCOPE_KEY, Caller, CrossOrigin, EntryGate, RunBinding, binding_of
from tuneloop.explorer.http import errors
from tuneloop.explorer.http.bodies import read_body
from tuneloop.explorer.limits import PIECE_BYTES, BodyLimits, ConnectionLimits, RequestMeter
from tuneloop.shared.errors import RequestRefused

log = structlog.get_logger()

Headers = Sequence[tuple[bytes, bytes]]

_REQUEST_ID = b"x-request-id"


class ClientRequest:
    """A client's request: its head, its body, who sends it and what it takes; and its response, over ASGI."""

    def __init__(self, scope: Any, receive: Any, send: Any, *, caller: Caller, meter: RequestMeter) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.path: str = scope["path"]
        self.run: RunBinding | None = binding_of(scope)
        self.caller, self.meter = caller, meter
        self.started = self.client_left = False
        self._unsent: _Suspended | None = None
        self._watching: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str | None:
        """The value of a request's header; `name` in lower case."""
        return next((str(value, "latin-1") for each, value in self._scope["headers"] if each == name), None)

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. From now on the task that asks for it is cancelled when the client leaves.

        Raises RequestRefused.
        """
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
        """Whether the client leaves matters no more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # else the two would hold each other

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response, no faster than its client reads it."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await _send_body(self._send, body, more_body=False)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin a response."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, chunk: bytes) -> bool:
        """Send a chunk, without a task in between; False where the client reads too slowly: `drain` sends it then."""
        sending = self._send({"type": "http.response.body", "body": chunk, "more_body": True}).__await__()
        try:
            self._unsent = _Suspended(sending, next(sending))
        except StopIteration:
            return True
        return False

    @property
    def client_is_slow(self) -> bool:
        """Whether a chunk waits until the client has read more."""
        return self._unsent is not None

    async def drain(self) -> None:
        """Send the chunk that waits, when the client has read most of what was written."""
        if self._unsent is not None:
            await self._unsent
            self._unsent = None

    async def end_stream(self, chunk: bytes) -> None:
        """Send the last chunk, if there is one, and end the response."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def refuse(self, error: RequestRefused) -> None:
        """Send the response to a request that is refused."""
        response = errors.error_response(error, self.path, self.header(_REQUEST_ID))
        self.started = True
        await response(self._scope, self._receive, self._send)


class _Suspended:
    """An awaitable that was begun outside a task, and now goes on in one; it waits for what it has yielded."""

    def __init__(self, sending: Generator[Any, Any, Any], waits_for: Any) -> None:
        self._sending, self._waits_for = sending, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        yield from self._sending


#: Answers a request for a reply. It is cancelled when the client disconnects.
SamplingRoute = Callable[[ClientRequest], Awaitable[None]]


class Edge:
    """The app. `routes` are for requests for replies, by path; `app` has all others.

    Without a gate everybody may come in, with no scope.
    """

    def __init__(
        self,
        app: Any,
        routes: Mapping[str, SamplingRoute],
        *,
        limits: BodyLimits | None = None,
        connections: ConnectionLimits | None = None,
        gate: EntryGate | None = None,
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
        try:
            caller = Caller() if self._gate is None else self._gate.admit(scope)
            meter = RequestMeter(self.limits, caller.meter)
        except RequestRefused as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            route = self.routes.get(scope["path"]) if scope["method"] == "POST" else None
            if route is not None:
                await _answer(route, ClientRequest(scope, receive, send, caller=caller, meter=meter))
            else:
                binding_of(scope)
                scope[SCOPE_KEY] = caller
                answer = _Answer(scope, receive, send, meter=meter, more=self._cross_origin.headers(scope))
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
    """Answer a request for a reply; a response that is left unfinished breaks off its connection."""
    try:
        await route(request)
    except asyncio.CancelledError:
        if not (request.client_left or request.started):  # the server is stopping and has waited long enough
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
    """Sends an answer of FastAPI's with `x-request-id`, no faster than its client reads it.

    A large one is held until its last piece is sent; where there is no room for it, a refusal is sent in its place.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, *, meter: RequestMeter, more: Headers) -> None:
        self._scope, self._receive, self._send, self._meter, self._more = scope, receive, send, meter, more
        self._start: Any = None
        self._is_over = False

    async def __call__(self, message: Any) -> None:
        """Take a message of the app."""
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
