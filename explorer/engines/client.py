"""HTTP/1.1 to an engine, for requests that must cost next to nothing: kept connections, replies as they arrive."""

import asyncio
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
KEEP_S = 4.0

#: What is read of a reply before its reader has taken the first of it.
_HIGH_WATER = 256 << 10

_CONNECT_S = 10.0


class EngineReply:
    """An engine's reply. Whoever leaves it before its end closes it, and the engine stops sampling."""

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        #: Whether the engine has said anything at all.
        self.begun = False
        self._connection = connection
        self._blocks: deque[bytes] = deque()
        self._held = 0
        self._pour: Callable[[bytes], bool] | None = None
        self._enough = False
        self._ended = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body. Raises EngineError if the engine breaks off."""
        blocks = [block async for block in self.blocks()]
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises EngineError if the engine breaks off."""
        while True:
            if self._blocks:
                yield self._held_back()
            elif self._ended:
                return
            elif self._lost:
                raise self._lost
            else:
                await self._news()

    async def pour(self, into: Callable[[bytes], bool]) -> bool:
        """Give the body to a function as it arrives, with no task in between; what that raises is raised here.

        True when that was all. False when the function has said so: then it is given no more until it is poured into
        again. Raises EngineError if the engine breaks off.
        """
        while self._blocks:
            if not into(self._held_back()):
                return False
        while not (self._ended or self._lost or self._blocks):
            self._pour = into
            try:
                await self._news()
            finally:
                self._pour = None
            if self._enough:
                self._enough = False
                return False
        if self._lost:
            raise self._lost
        return self._ended

    def _held_back(self) -> bytes:
        block = self._blocks.popleft() if len(self._blocks) == 1 else b"".join(self._blocks)
        self._blocks.clear()
        self._held = 0
        self._connection.read_on()
        return block

    def close(self) -> None:
        """Take no more of it."""
        if not self._ended:
            self._connection.abort()

    async def until_begun(self) -> None:
        """Wait for status and headers. Raises EngineError if the connection ends before."""
        while not (self.status or self._lost):
            await self._news()
        if self._lost and not self.status:
            raise self._lost

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the end of the connection tells where it ends."""
        return bool(self.status) and self.headers.keys().isdisjoint((b"content-length", b"transfer-encoding"))

    def begin(self, status: int) -> None:
        """What the connection says: the headers are whole."""
        self.status = status
        self._wake()

    def take(self, block: bytes) -> bool:
        """Also: here is a part of the body. False if no more should be read for now."""
        if self._pour is not None:
            try:
                self._enough = not self._pour(block)
            except Exception as error:  # noqa: BLE001 - raised where the body is poured
                self._lost = error
            if self._enough or self._lost:
                self._pour = None
                self._wake()
            return True
        self._blocks.append(block)
        self._held += len(block)
        self._wake()
        return self._held < _HIGH_WATER

    def end(self) -> None:
        """Also: that was all."""
        self._ended = True
        self._wake()

    def lose(self, error: EngineError) -> None:
        """Also: there will be no more."""
        self._lost = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RenamedEngineReply(EngineReply):
    """A reply of an adapter, under the name that clients call it by. It is passed on by whole lines."""

    def __init__(self, connection: "_Connection", renaming: ModelRenaming) -> None:
        super().__init__(connection)
        self._renaming = renaming
        self._line = b""

    def take(self, block: bytes) -> bool:
        """The same."""
        lines, end, self._line = (self._line + block).rpartition(b"\n")
        return super().take(self._renaming.told(lines + end)) if end else True

    def end(self) -> None:
        """The same; the last line may have no end of its own."""
        if self._line:
            super().take(self._renaming.told(self._line))
        super().end()


class _Connection(asyncio.Protocol):
    """One connection, for one request at a time. Its methods without a docstring are httptools' callbacks."""

    def __init__(self, idle: "deque[_Connection]") -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._reply: EngineReply | None = None
        self._reading = True
        self.idle_since = 0.0

    @property
    def closing(self) -> bool:
        """Whether it can be used no more."""
        return self._transport.is_closing()

    def ask(self, request: bytes, renaming: ModelRenaming | None) -> EngineReply:
        """Send a request, head and body."""
        self._reply = reply = RenamedEngineReply(self, renaming) if renaming else EngineReply(self)
        self._transport.write(request)
        return reply

    def read_on(self) -> None:
        """The reader has caught up."""
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(EngineError(f"the engine does not speak HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        reply = self._reply
        if reply is None:
            return
        if exc is None and reply.ends_with_connection:
            self._reply = None
            reply.end()
            return
        kind = EngineError if reply.begun else EngineUnreachable
        self._lose(kind(f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def _lose(self, error: EngineError) -> None:
        if self._reply is not None:
            self._reply.lose(error)
            self._reply = None

    def on_message_begin(self) -> None:
        if self._reply is None:
            self.abort()  # nobody asked: the next to ask would take it for the answer
            return
        self._reply.begun = True
        self._reply.headers.clear()  # those of a reply like 100 Continue, which comes before the real one

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._reply is not None and self._parser.get_status_code() >= 200:
            self._reply.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reply is not None and not self._reply.take(body) and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._reply is None or not self._reply.status:
            return
        reply, self._reply = self._reply, None
        if self._parser.should_keep_alive() and not self.closing:
            self.read_on()
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self._transport.close()
        reply.end()


class EngineHttp:
    """The connections to one engine, at a URL or on a Unix socket; as many as there are requests.

    Where the engine serves us an adapter, `renaming` says which.
    """

    def __init__(self, *, url: str | None = None, socket: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(url or "http://engine")
        self._socket = socket
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "engine"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._always = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\n{authorization}".encode()
        )
        self._idle: deque[_Connection] = deque()
        self.renaming: ModelRenaming | None = None

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """The reply, once it has begun. Raises EngineUnreachable before anything was answered, else EngineError.

        A kept connection may be closed by the engine at the moment when it is used: the request is sent again, once, on
        a new one. A new connection that is lost is another thing: the request may be what the engine died of.
        """
        renaming = self.renaming
        if renaming is not None and body:
            renamed = renaming.asked(body)
            body, renaming = (renamed, renaming) if renamed is not None else (body, None)
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{more}Content-Length: {len(body)}\r\n".encode("latin-1")
        request = b"%b%b\r\n%b" % (head, self._always, body)
        if (connection := self._kept()) is not None:
            try:
                return await _begun(connection.ask(request, renaming))
            except EngineUnreachable as error:
                log.warning("connection_lost", reason=str(error))
        return await _begun((await self._connect()).ask(request, renaming))

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()
        await asyncio.sleep(0)  # until then the loop still holds them

    def _kept(self) -> "_Connection | None":
        """The connection used last, so that those too many grow old."""
        oldest = time.monotonic() - KEEP_S
        while self._idle and (self._idle[0].closing or self._idle[0].idle_since < oldest):
            self._idle.popleft().abort()
        while self._idle:
            if not (connection := self._idle.pop()).closing:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._idle)
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self._socket:
                    await loop.create_unix_connection(lambda: connection, self._socket)
                else:
                    await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise EngineUnreachable(f"the engine cannot be reached: {error or 'no answer'}") from error
        return connection


async def _begun(reply: EngineReply) -> EngineReply:
    try:
        await reply.until_begun()
    except asyncio.CancelledError:
        reply.close()
        raise
    return reply
