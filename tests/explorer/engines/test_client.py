"""The client's side of HTTP, against engines whose every byte the test writes."""

import asyncio
import contextlib
import ssl
import subprocess
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.shared.errors import EngineError, EngineUnreachable

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Answer = Callable[[StreamWriter], Awaitable[None]]


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test on the loop that serves."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(test(**fixtures))

    return run


class RawEngine:
    """Answers each request that it hears with the next of its answers, the last one for ever."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self.answers = list(answers)
        self.received: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()
        self.port = 0
        self._tasks: set[Any] = set()

    async def __call__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.connections += 1
        self._tasks.add(asyncio.current_task())
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.received.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            writer.transport.abort()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def served(engine: RawEngine, *, host: str = "127.0.0.1", **more: Any) -> AsyncIterator[str]:
    """The URL of a raw engine."""
    server = await asyncio.start_server(engine, host, 0, **more)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http{'s' if more else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.close()
        await engine.stop()


@asynccontextmanager
async def asking(*answers: bytes | Answer) -> AsyncIterator[tuple[EngineHttp, RawEngine]]:
    """A client, and the engine that it asks."""
    engine = RawEngine(*answers)
    async with served(engine) as url:
        http = EngineHttp(url=url)
        try:
            yield http, engine
        finally:
            await http.close()


async def whole(http: EngineHttp) -> tuple[int, bytes]:
    reply = await http.request("POST", "/x", b"{}")
    try:
        return reply.status, await asyncio.wait_for(reply.read(), 5)
    finally:
        reply.close()


def closing(data: bytes) -> Answer:
    """Say something, then close the connection."""

    async def answer(writer: StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return answer


async def resetting(writer: StreamWriter) -> None:
    """Close before anything is answered."""
    writer.transport.abort()


def in_pieces(data: bytes, cuts: list[int]) -> Answer:
    """Say something in pieces that arrive one by one."""

    async def answer(writer: StreamWriter) -> None:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            writer.write(data[start:end])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"


def sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data(), body=st.binary(min_size=1, max_size=200), chunk=st.integers(1, 50), sizes=st.booleans())
def test_no_cut_of_the_bytes_changes_a_reply(data: Any, body: bytes, chunk: int, sizes: bool) -> None:
    framed = sized(body) if sizes else chunked(body, chunk)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(framed) - 1), max_size=12)))

    async def check() -> None:
        async with asking(in_pieces(framed, cuts)) as (http, engine):
            assert [await whole(http) for _ in range(2)] == [(200, body)] * 2
            assert engine.connections == 1

    uvloop.run(check())


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(noise=st.binary(max_size=40), at=st.integers(0, len(OK)), keeps=st.booleans())
def test_whatever_an_engine_says_it_is_a_reply_or_an_error(noise: bytes, at: int, keeps: bool) -> None:
    reply = closing(OK[:at] + noise + (OK[at:] if keeps else b""))

    async def check() -> None:
        async with asking(reply) as (http, _):
            with contextlib.suppress(EngineError):
                await whole(http)

    uvloop.run(check())


@pytest.mark.parametrize(
    "reply",
    [
        b"garbage, and no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"5\r\nhe",
        CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
        CHUNKED,
    ],
)
@on_uvloop
async def test_a_reply_that_breaks_off_is_an_error_and_not_asked_for_again(reply: bytes) -> None:
    async with asking(closing(reply)) as (http, engine):
        with pytest.raises(EngineError) as caught:
            await whole(http)
        assert not isinstance(caught.value, EngineUnreachable)
        assert len(engine.received) == 1


@on_uvloop
async def test_a_kept_connection_closed_at_the_moment_of_use_costs_nothing() -> None:
    async with asking(OK, resetting, OK) as (http, engine):
        assert [await whole(http) for _ in range(2)] == [(200, b"hello")] * 2
        assert engine.connections == 2


@on_uvloop
async def test_a_new_connection_that_is_lost_is_not_tried_again() -> None:
    async with asking(resetting) as (http, engine):
        with pytest.raises(EngineUnreachable):
            await whole(http)
        assert len(engine.received) == 1
    async with asking(OK, resetting) as (http, engine):
        await whole(http)
        with pytest.raises(EngineUnreachable):
            await whole(http)
        assert len(engine.received) == 3


@on_uvloop
async def test_nobody_at_home_is_said_so() -> None:
    async with served(RawEngine(OK)) as url:
        pass
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await EngineHttp(url=url).request("GET", "/")
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await EngineHttp(socket="/nowhere.sock").request("GET", "/")


@on_uvloop
async def test_an_engine_is_asked_at_its_url_with_its_key() -> None:
    engine = RawEngine(OK)
    async with served(engine) as url:
        at = url.removeprefix("http://")
        http = EngineHttp(url=f"http://{at}/below/", key="secret")
        reply = await http.request("POST", "/v1/x", b"{}", {"X-Request-Id": "7"})
        assert await reply.read() == b"hello"
        await http.close()
    lines = engine.received[0].decode().split("\r\n")
    assert lines[0] == "POST /below/v1/x HTTP/1.1"
    assert {f"Host: {at}", "Authorization: Bearer secret", "X-Request-Id: 7", "Content-Length: 2"} < set(lines)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and its self-signed certificate for 127.0.0.1, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    key, signed = folder / "key.pem", folder / "signed.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(signed)], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + signed.read_bytes())
    return both


@on_uvloop
async def test_tls_is_spoken_and_a_certificate_that_nobody_trusts_is_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with served(RawEngine(OK), ssl=context) as url:
        with pytest.raises(EngineUnreachable, match="certificate verify failed"):
            await EngineHttp(url=url).request("GET", "/")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        http = EngineHttp(url=url)
        assert [await whole(http) for _ in range(2)] == [(200, b"hello")] * 2
        await http.close()


@on_uvloop
async def test_who_is_cancelled_before_the_reply_closes_the_connection() -> None:
    async def silent(writer: StreamWriter) -> None:
        pass

    async with asking(silent) as (http, engine):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await http.request("POST", "/x")
        await asyncio.wait_for(engine.left.wait(), 5)


@on_uvloop
async def test_what_nobody_reads_is_not_heaped_up() -> None:
    block, blocks, sent = b"x" * 65536, 1000, 0

    async def much(writer: StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (blocks * len(block)))
        for _ in range(blocks):
            writer.write(block)
            await writer.drain()
            sent += len(block)

    async with asking(much) as (http, _):
        reply = await http.request("POST", "/x")
        await asyncio.sleep(0.3)
        assert reply._buffered_bytes < 1 << 20
        assert sent < 16 << 20  # the rest lies in the two sockets
        assert len(await reply.read()) == blocks * len(block)
        assert sent == blocks * len(block)
