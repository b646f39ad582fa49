"""What strangers do with connections: too many of them, too slowly, with trailers and upgrades."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from tests.doubles.engine import CHAT, EnginePlace
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tests.explorer.wire import BODY, Wire, chunked, http_request, is_closed
from tuneloop.explorer.edge import ClientRequest, Edge, Http11, SamplingRoute
from tuneloop.explorer.limits import BodyLimits, ConnectionLimits, most_connections

pytestmark = pytest.mark.contract

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
ADMIN_KEY = "an-administrators-key"


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    folder = tmp_path_factory.mktemp("connections")
    with explorer_running(settings_for(folder, [places[0].fresh().url], admin_key=ADMIN_KEY)) as running:
        yield running


@pytest.mark.parametrize("trailer", [b"x: y", b"Connection: close", b"a:b\r\n" * 3 + b"c:d"])
def test_trailers_are_refused_and_the_connection_ends(explorer: RunningExplorer, trailer: bytes) -> None:
    with Wire(explorer.url) as wire:
        wire.send(chunked(BODY)[:-2] + trailer + b"\r\n\r\n")
        answer = wire.response()
        assert (answer.status, answer.error["code"]) == (400, "trailers_not_accepted")
        assert answer.headers["connection"] == "close"
        assert wire.rest() == b""


def test_a_trailer_opens_nothing(explorer: RunningExplorer) -> None:
    path = "/admin/versions"
    body = f"GET {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n".encode()
    with Wire(explorer.url) as wire:
        wire.send(body + f"Authorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
        assert wire.response().status in {400, 401}


@pytest.mark.parametrize("endless", [b"a" * 4096, b"a:" + b"b" * 4094])
def test_what_follows_a_body_has_an_end(explorer: RunningExplorer, endless: bytes) -> None:
    with Wire(explorer.url) as wire:
        wire.send(chunked(BODY)[:-2])
        assert is_closed(wire, endless)


def test_pipelined_upgrades_are_answered_each(explorer: RunningExplorer) -> None:
    upgrade = http_request(b"", "Upgrade: websocket", "Connection: upgrade", path="/health", method="GET")
    with Wire(explorer.url) as wire, capture_logs() as logs:
        wire.send(upgrade * 500)
        assert [wire.response().status for _ in range(500)] == [200] * 500
    assert logs == []


@asynccontextmanager
async def server_with(
    connections: ConnectionLimits | None = None,
    app: Any = None,
    gate: asyncio.Event | None = None,
    route: SamplingRoute | None = None,
    limits: BodyLimits | None = None,
) -> AsyncIterator[Callable[[], Awaitable["Connection"]]]:
    """A server whose sampling route answers a body with its length, and waits for a gate where that is 3."""
    opened_gate = gate or asyncio.Event()

    async def answer(request: ClientRequest) -> None:
        size = len(await request.body(1 << 20))
        await asyncio.sleep(0)
        try:
            if size == 3:
                await opened_gate.wait()
        except asyncio.CancelledError:
            if gate is not None:
                await gate.wait()
            raise
        await request.respond(200, [], b"%d" % size)

    routes = Edge(app, {CHAT: route or answer}, limits=limits, connections=connections)
    config, state = uvicorn.Config(routes, ws="none", lifespan="off"), ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: Http11(config, state, {}), "127.0.0.1", 0)

    opened: list[Connection] = []

    async def connect() -> Connection:
        opened.append(await asyncio.open_connection(*server.sockets[0].getsockname()))
        return opened[-1]

    try:
        yield connect
    finally:
        for _, writer in opened:
            writer.close()
        server.close()
        async with asyncio.timeout(5):
            while state.connections:  # noqa: ASYNC110 - the protocols tell nobody when they end
                await asyncio.sleep(0.01)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ended(connection: Connection, *, within_s: float = 5) -> bytes:
    """All that comes until the server closes."""
    async with asyncio.timeout(within_s):
        return await connection[0].read()


async def test_a_connection_that_asks_nothing_is_closed() -> None:
    async with server_with(ConnectionLimits(head_timeout_s=0.2)) as connect:
        assert await ended(await connect()) == b""
        reader, writer = await connect()
        writer.write(b"\r\n")
        assert await ended((reader, writer)) == b""


async def test_a_head_that_drips_is_refused() -> None:
    async with server_with(ConnectionLimits(head_timeout_s=0.3)) as connect:
        reader, writer = await connect()
        for each in b"POST / HTTP/1.1\r\n":
            writer.write(bytes([each]))
            await asyncio.sleep(0.01)
        assert b" 408 " in await ended((reader, writer))


async def test_a_body_that_drips_is_refused_and_the_next_request_has_its_own_time() -> None:
    async with server_with(ConnectionLimits(head_timeout_s=0.5), limits=BodyLimits(body_timeout_s=0.5)) as connect:
        reader, writer = await connect()
        for _ in range(3):
            writer.write(http_request(b"1234"))
            assert (await reader.readuntil(b"\r\n\r\n4")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.3)
        writer.write(http_request(b"12345")[:-4])
        await asyncio.sleep(0.3)
        writer.write(b"2")
        answer = await ended((reader, writer))
        assert b" 408 " in answer
        assert b"body_timeout" in answer


async def test_many_heads_that_come_together_are_no_long_head() -> None:
    async with server_with() as connect:
        reader, writer = await connect()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        count = (160 << 10) // len(head)
        writer.write(head * count + head[:30])
        async with asyncio.timeout(60):
            for _ in range(count):
                assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
            writer.write(head[30:])
            await reader.readuntil(b"\r\n\r\n0")
            writer.write(head + head[:-2] + b"x: ")
            await reader.readuntil(b"\r\n\r\n0")
        writer.write(b"a" * (65 << 10))
        assert b" 431 " in await ended((reader, writer))


async def test_a_slow_answer_is_no_slow_request() -> None:
    async with server_with(ConnectionLimits(head_timeout_s=0.1), limits=BodyLimits(body_timeout_s=0.1)) as connect:
        reader, writer = await connect()
        writer.write(http_request(b"123"))
        with pytest.raises(TimeoutError):
            await ended((reader, writer), within_s=0.5)


async def test_a_newcomer_takes_the_place_of_the_longest_idle_connection() -> None:
    limits = ConnectionLimits(max_connections=3)
    async with server_with(limits) as connect:
        first, second, third = [await connect() for _ in range(3)]
        first[1].write(http_request(b"1234"))
        await first[0].readuntil(b"\r\n\r\n4")
        fourth = await connect()
        assert await ended(second) == b""
        fourth[1].write(http_request(b"1234"))
        await fourth[0].readuntil(b"\r\n\r\n4")
        assert len(limits.idle) == 3
        third[1].close()
        first[1].write(http_request(b"1234"))
        await first[0].readuntil(b"\r\n\r\n4")


async def test_a_connection_at_work_is_closed_for_nobody() -> None:
    async with server_with(ConnectionLimits(max_connections=2)) as connect:
        working = [await connect() for _ in range(2)]
        for _, writer in working:
            writer.write(http_request(b"123"))
        await asyncio.sleep(0.1)
        answer = await ended(await connect())
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        assert not any(reader.at_eof() for reader, _ in working)


async def test_what_is_held_of_bodies_is_bounded_and_given_back() -> None:
    limits = BodyLimits(max_held_bytes=1000)
    async with server_with(limits=limits) as connect:
        for _ in range(3):
            reader, writer = await connect()
            writer.write(http_request(b"x" * 600))
            await reader.readuntil(b"\r\n\r\n600")
            await until(lambda: limits.held_bytes == 0)
        holding = await connect()
        holding[1].write(http_request(b"x" * 500)[:-1])
        await until(lambda: limits.held_bytes == 499)
        reader, writer = await connect()
        writer.write(http_request(b"x" * 600))
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        holding[1].close()
        await until(lambda: limits.held_bytes == 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [CHAT, "/through-asgi"])
async def test_a_body_counts_until_the_work_for_it_is_over_even_if_its_client_has_left(path: str) -> None:
    limits, gate, left = BodyLimits(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"123"
        assert (await receive())["type"] == "http.disconnect"
        left.set()
        await gate.wait()

    async with server_with(app=app, gate=gate, limits=limits) as connect:
        _, writer = await connect()
        writer.write(http_request(b"123", path=path))
        await until(lambda: limits.held_bytes == 3)
        for _ in range(10):  # the route has begun
            await asyncio.sleep(0)
        writer.close()
        if path != CHAT:
            await left.wait()
        other, _ = connection = await connect()
        connection[1].write(http_request(b"1234"))
        await other.readuntil(b"\r\n\r\n4")
        assert limits.held_bytes == 3
        gate.set()
        await until(lambda: limits.held_bytes == 0)


def answering(size: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    return app


GET = b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_a_large_answer_is_held_while_its_client_reads_it_and_not_for_ever() -> None:
    limits, connections, size = BodyLimits(), ConnectionLimits(), 64 << 20  # more than the system takes of it
    async with server_with(connections, answering(size), limits=limits) as connect:
        reader, writer = await connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        assert limits.held_bytes == size
        assert await reader.readexactly(size) == b"x" * size
        await until(lambda: limits.held_bytes == 0)
        connections.read_timeout_s = 0.2
        reader, writer = await connect()
        writer.write(GET)
        await until(lambda: limits.held_bytes == size)
        await until(lambda: limits.held_bytes == 0)
        with contextlib.suppress(ConnectionError):
            assert len(await ended((reader, writer), within_s=60)) < size


@pytest.mark.parametrize("path", [CHAT, "/through-asgi"])
async def test_requests_whose_answers_nobody_reads_are_not_answered_for_ever(path: str) -> None:
    async def answer(request: ClientRequest) -> None:
        await request.respond(200, [], b"x" * 60_000)

    async with server_with(ConnectionLimits(read_timeout_s=0.2), answering(60_000), route=answer) as connect:
        _, writer = await connect()
        for _ in range(1000):
            writer.write(http_request(b"", path=path))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(sent_for_ever(writer), 60)


async def sent_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\r\n")
        await asyncio.sleep(0.01)
        await writer.drain()


async def test_a_client_that_reads_late_gets_all_of_its_answers() -> None:
    async def answer(request: ClientRequest) -> None:
        await request.respond(200, [], b"x" * 200_000)

    async with server_with(route=answer) as connect:
        reader, writer = await connect()
        for _ in range(200):
            writer.write(http_request(b""))
        for _ in range(200):
            async with asyncio.timeout(60):
                assert b"content-length: 200000" in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(200_000) == b"x" * 200_000


async def test_an_answer_for_which_there_is_no_room_is_refused() -> None:
    async with server_with(app=answering(2 << 20), limits=BodyLimits(max_held_bytes=1 << 20)) as connect:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"overloaded" in await reader.readuntil(b"}}")


OVERLONG = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "


@pytest.mark.parametrize("size", [70_000, 250_000, 1_000_000])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("before", [0, 3])
async def test_an_overlong_head_is_refused_when_what_came_before_it_is_answered(
    size: int, end: bytes, before: int
) -> None:
    async with server_with() as connect:
        reader, writer = await connect()
        writer.write(http_request(b"1234") * before + OVERLONG + b"a" * size + end)
        answers = (await ended((reader, writer), within_s=60)).split(b"HTTP/1.1 ")[1:]
        assert [each[:3] for each in answers] == [b"200"] * before + [b"431"]
        assert b"connection: close" in answers[-1]


BROKEN = {"trailers_not_accepted": chunked(BODY)[:-2] + b"x: y\r\n\r\n", "invalid_http": b"garbage\r\n\r\n"}


@pytest.mark.parametrize("code", BROKEN)
async def test_what_came_before_something_broken_is_answered_first(code: str) -> None:
    gate = asyncio.Event()
    async with server_with(gate=gate) as connect:
        reader, writer = await connect()
        writer.write(http_request(b"1234") + http_request(b"123") + BROKEN[code] + http_request(b"1234"))
        await reader.readuntil(b"\r\n\r\n4")
        writer.write(http_request(b"1234"))
        gate.set()
        answer = await ended((reader, writer), within_s=60)
        assert answer.count(b"HTTP/1.1 ") == 2
        assert answer.partition(b"\r\n\r\n3")[2].startswith(b"HTTP/1.1 400")
        assert code.encode() in answer


async def test_a_head_that_drips_behind_a_request_leaves_that_its_answer() -> None:
    gate, limits = asyncio.Event(), ConnectionLimits(head_timeout_s=0.05)
    async with server_with(limits, gate=gate) as connect:
        reader, writer = await connect()
        writer.write(http_request(b"123") + OVERLONG)
        with pytest.raises(TimeoutError):
            await ended((reader, writer), within_s=0.3)
        gate.set()
        answer = await ended((reader, writer), within_s=60)
        assert answer.partition(b"\r\n\r\n3")[2].startswith(b"HTTP/1.1 408")


def test_descriptors_are_left_for_the_rest() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert (most_connections(None), most_connections(10)) == (768, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_requests_of_a_connection_that_is_closed_hear_of_it() -> None:
    """Uvicorn tells the last request alone, and uvloop refuses to write there."""
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def ask() -> None:
        async with server_with(app=app) as connect:
            _, writer = await connect()
            writer.write(2 * http_request(b"", path="/through-asgi"))
            await asyncio.sleep(0.05)
            writer.transport.abort()
            await until(lambda: heard)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
    assert heard == [{"type": "http.disconnect"}]
