"""A raw HTTP/1.1 client to an engine, for the hot path: persistent connections, replies as they arrive."""

import asyncio
import copy
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools
import structlog

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.shared.errors import EngineError, EngineUnreachable

log = structlog.get_logger()

#: Shorter than the five seconds after which uvicorn, and so vLLM, closes an idle connection.
IDLE_TIMEOUT_S = 4.0

#: Bytes of a reply that are buffered for its reader before the socket is paused.
_HIGH_WATER = 256 << 10

_CONNECT_S = 10.0

#: A request that comes within so many seconds of a cancelled one asks the same engine again.
_ASKED_AGAIN_S = 30.0


class EngineReply:
    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        #: Whether any byte of it has arrived.
        self.started = False
        self._connection = connection
        self._blocks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._sink: Callable[[bytes], bool] | None = None
        self._sink_paused = False
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body. Raises EngineError if the engine breaks off."""
        blocks = [block async for block in self.blocks()]
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineError if the engine breaks off."""
        while True:
            if self._blocks:
                yield self._take_buffered()
            elif self._ended:
                return
            elif self._error:
                raise self._error
            else:
                await self._wait_for_data()

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        """Call a function with the body as it arrives, with no task in between; what that raises is raised here.

        True when that was all. False when the function has returned False: then it gets no more until the next call of
        this method. Raises EngineError if the engine breaks off.
        """
        while self._blocks:
            if not sink(self._take_buffered()):
                return False
        while not (self._ended or self._error or self._blocks):
            self._sink = sink
            try:
                await self._wait_for_data()
            finally:
                self._sink = None
            if self._sink_paused:
                self._sink_paused = False
                return False
        if self._error:
            raise self._error
        return self._ended

    def _take_buffered(self) -> bytes:
        block = self._blocks.popleft() if len(self._blocks) == 1 else b"".join(self._blocks)
        self._blocks.clear()
        self._buffered_bytes = 0
        self._connection.resume_reading()
        return block

    def close(self) -> None:
        if not self._ended:
            self._connection.abort()

    async def wait_for_head(self) -> None:
        """Wait for status and headers. Raises EngineError if the connection ends before."""
        while not (self.status or self._error):
            await self._wait_for_data()
        if self._error and not self.status:
            raise self._error

    async def _wait_for_data(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection marks the end of the body."""
        return bool(self.status) and self.headers.keys().isdisjoint((b"content-length", b"transfer-encoding"))

    def receive_head(self, status: int) -> None:
        self.status = status
        self._wake()

    def receive(self, block: bytes) -> bool:
        """Called by the connection with a part of the body. False if no more should be read for now."""
        if self._sink is not None:
            try:
                self._sink_paused = not self._sink(block)
            except Exception as error:  # noqa: BLE001 - raised by `pipe`
                self._error = error
            if self._sink_paused or self._error:
                self._sink = None
                self._wake()
            return True
        self._blocks.append(block)
        self._buffered_bytes += len(block)
        self._wake()
        return self._buffered_bytes < _HIGH_WATER

    def receive_end(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RenamedEngineReply(EngineReply):
    """A reply of an adapter, under the model name that clients use: passed on by whole lines, long ones in parts."""

    def __init__(self, connection: "_Connection", renaming: ModelRenaming) -> None:
        super().__init__(connection)
        self._renaming = renaming
        self._line: list[bytes] = []
        self._line_bytes = 0

    def receive(self, block: bytes) -> bool:
        end = block.rfind(b"\n") + 1
        before = self._line_bytes
        self._line.append(block)
        self._line_bytes += len(block)
        if not end and self._line_bytes < _HIGH_WATER:
            return True
        data = b"".join(self._line)
        # A name has no comma in it, and the field that it is in comes after one.
        end = before + end if end else data.rfind(b",") + 1 or len(data)
        self._line, self._line_bytes = [data[end:]], len(data) - end
        return super().receive(self._renaming.rename_reply(data[:end]))

    def receive_end(self) -> None:
        """See EngineReply. The last line may have no newline."""
        if self._line_bytes:
            super().receive(self._renaming.rename_reply(b"".join(self._line)))
        super().receive_end()


class EngineIdleTime:
    """For how long an engine has sent no byte to requests that wait for it."""

    def __init__(self) -> None:
        self._waiting: set[object] = set()
        self._began = self._left = self.received_at = float("-inf")

    def begin(self, request: object) -> None:
        now = time.monotonic()
        # A client that cancels and asks again has waited all the time.
        if not self._waiting and (self.received_at >= self._began or now - self._left > _ASKED_AGAIN_S):
            self._began = now
        self._waiting.add(request)

    def end(self, request: object) -> None:
        self._left = time.monotonic() if request in self._waiting else self._left
        self._waiting.discard(request)

    @property
    def seconds(self) -> float | None:
        """How long; None where nothing waits."""
        return time.monotonic() - max(self._began, self.received_at) if self._waiting else None


class _Connection(asyncio.Protocol):
    """One connection, for one request at a time. Its methods without a docstring are httptools' callbacks."""

    def __init__(self, idle: "deque[_Connection]", quiet: EngineIdleTime) -> None:
        self._idle, self._quiet = idle, quiet
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._reply: EngineReply | None = None
        self._reading = True
        self.idle_since = 0.0

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def send(self, request: bytes, renaming: ModelRenaming | None) -> EngineReply:
        self._reply = reply = RenamedEngineReply(self, renaming) if renaming else EngineReply(self)
        self._quiet.begin(self)
        self._transport.write(request)
        return reply

    def resume_reading(self) -> None:
        """Called by the reply when its reader has caught up."""
        if not self._reading:
            self._reading = True
            if self._reply is not None:
                self._quiet.begin(self)
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._quiet.received_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineError(f"the engine does not answer in HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._quiet.end(self)
        reply = self._reply
        if reply is None:
            return
        if exc is None and reply.ends_with_connection:
            self._reply = None
            reply.receive_end()
            return
        kind = EngineError if reply.started else EngineUnreachable
        self._fail(kind(f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def _fail(self, error: EngineError) -> None:
        if self._reply is not None:
            self._reply.fail(error)
            self._reply = None

    def on_message_begin(self) -> None:
        if self._reply is None:
            self.abort()  # there is no request: the next one would take this for its reply
            return
        self._reply.started = True
        self._reply.headers.clear()  # those of a reply like 100 Continue, which comes before the real one

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._reply is not None and self._parser.get_status_code() >= 200:
            self._reply.receive_head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reply is not None and not self._reply.receive(body) and self._reading:
            self._reading = False
            self._quiet.end(self)  # the client is waited for, and not the engine
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._reply is None or not self._reply.status:
            return
        reply, self._reply = self._reply, None
        self._quiet.end(self)
        if self._parser.should_keep_alive() and not self.closing:
            self.resume_reading()
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self._transport.close()
        reply.receive_end()


class EngineHttp:
    """The connections to one engine; as many as there are requests. `renaming` is set while it serves an adapter."""

    def __init__(self, *, url: str | None = None, socket: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(url or "http://engine")
        self._socket = socket
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "engine"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._fixed_headers = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\n{authorization}".encode()
        )
        self._idle: deque[_Connection] = deque()
        self.quiet = EngineIdleTime()
        self.renaming: ModelRenaming | None = None

    def under(self, renaming: ModelRenaming | None) -> "EngineHttp":
        """The same connections, to ask another adapter, or the base model."""
        found = copy.copy(self)
        found.renaming = renaming
        return found

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """The reply, once its head has arrived. Raises EngineUnreachable before any byte of it, else EngineError.

        An engine may close an idle connection at the moment when it is used: the request is sent again, once, on a new
        one. A request that loses a new connection is not sent again: it may be what the engine died of.
        """
        renaming = self.renaming
        if renaming is not None and body:
            renamed = renaming.rename_request(body)
            body, renaming = (renamed, renaming) if renamed is not None else (body, None)
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{extra}Content-Length: {len(body)}\r\n".encode("latin-1")
        request = b"%b%b\r\n%b" % (head, self._fixed_headers, body)
        if (connection := self._reuse_idle()) is not None:
            try:
                return await _await_head(connection.send(request, renaming))
            except EngineUnreachable as error:
                log.warning("connection_lost", reason=str(error))
        return await _await_head((await self._connect()).send(request, renaming))

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
        await asyncio.sleep(0)  # the loop drops them in its next turn

    def _reuse_idle(self) -> "_Connection | None":
        """The connection used last, so that superfluous ones time out; None if there is none."""
        oldest = time.monotonic() - IDLE_TIMEOUT_S
        while self._idle and (self._idle[0].closing or self._idle[0].idle_since < oldest):
            self._idle.popleft().abort()
        while self._idle:
            if not (connection := self._idle.pop()).closing:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._idle, self.quiet)
        self.quiet.begin(connection)  # an engine that is connected to in vain sends nothing either
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._socket:
                    await loop.create_unix_connection(lambda: connection, self._socket)
                else:
                    await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except BaseException as error:
            self.quiet.end(connection)
            if not isinstance(error, OSError):
                raise
            why = str(error) or f"no connection within {_CONNECT_S:g} s: check the host and DNS"
            raise EngineUnreachable(f"the engine cannot be reached: {why}") from error
        return connection


async def _await_head(reply: EngineReply) -> EngineReply:
    try:
        await reply.wait_for_head()
    except asyncio.CancelledError:
        reply.close()
        raise
    return reply
