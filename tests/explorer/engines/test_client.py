"""The client's side of HTTP, against engines whose every byte the test writes."""

import asyncio
import contextlib
import json
import math
import ssl
import subprocess
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doubles.engine import EngineDouble
from tests.explorer.conftest import Run
from tests.explorer.processes.test_workers import Staff, chat
from tests.explorer.running import HELLO, RunningExplorer, eventually
from tests.explorer.test_main import attached_to, service, write_settings
from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.fleet import (
    Engine,
    EngineState,
    TrafficSplit,
    bucket_of,
    choose_engine,
)
from tuneloop.explorer.engines.prefix_affinity import PrefixAffinity, hash_prefixes
from tuneloop.explorer.engines.vllm import EngineControl, open_session
from tuneloop.explorer.proxy.grammars import give_first_grammar
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
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
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


async def silent(writer: StreamWriter) -> None:
    """Say nothing."""


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


# The session of an engine's weight routes: where it goes, how long it waits, and what comes of what goes wrong.


@asynccontextmanager
async def controlling(folder: Path, engine: RawEngine, *, by_url: bool = False) -> AsyncIterator[EngineControl]:
    """The control of an engine at a URL, or on a socket of the file system."""
    async with AsyncExitStack() as stack:
        url, path = await stack.enter_async_context(served(engine)) if by_url else None, str(folder / "socket")
        if not by_url:
            await stack.enter_async_context(await asyncio.start_unix_server(engine, path))
            stack.push_async_callback(engine.stop)
        session = open_session(url=url, socket=None if by_url else path, key=None)
        yield EngineControl(await stack.enter_async_context(session), model_name="m")


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
async def test_an_engine_is_given_a_grammar_if_these_are_rebuilt(tmp_path: Path, status: bytes) -> None:
    """The library that enforces its first one enforces all."""
    engine = RawEngine(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)
    async with controlling(tmp_path, engine) as control:
        await give_first_grammar(control)
        assert engine.received == []
        control.rebuilds_grammars = True
        await give_first_grammar(control)  # one that enforces none is used all the same
    [asked] = engine.received
    assert json.loads(asked.partition(b"\r\n\r\n")[2])["structured_outputs"] == {"regex": "a"}


@pytest.mark.parametrize("by_url", [False, True])
async def test_it_asks_no_proxy_of_the_environment(
    tmp_path: Path, by_url: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with controlling(tmp_path, RawEngine(OK), by_url=by_url) as control:
        assert await control.healthy()


async def test_an_engine_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_TIMEOUT_S", 0.1)
    async with controlling(tmp_path, RawEngine(silent)) as control:
        assert not await control.healthy(timeout_s=0.1)
        with pytest.raises(EngineError, match=r"^/resume: TimeoutError$"):
            await control.resume()


# Which engine answers a request: by its version, and by the conversation that it goes on with.


def turn(text: str, *before: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Be kind."}, *before, {"role": "user", "content": text}]}


def next_turn(request: dict[str, Any], reply: str, text: str) -> dict[str, Any]:
    return turn(text, *request["messages"][1:], {"role": "assistant", "content": reply})


@pytest.mark.parametrize("long", ["a story " * 1000, list(range(8000))])
def test_a_prompt_goes_on_where_an_earlier_one_ended(long: Any) -> None:
    affinity, engine = PrefixAffinity(), Engine(3, EngineHttp())
    affinity.record(hash_prefixes({"prompt": long}), engine)
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long + long}), [engine]) == [{3}]
    assert affinity.engines_with_prefix(hash_prefixes({"prompt": long[1:] + long}), [engine]) == []


@pytest.fixture
def two(running_explorer: Run, doubles: list[EngineDouble]) -> RunningExplorer:
    explorer = running_explorer(*doubles)
    eventually(lambda: all(each.state is EngineState.READY for each in explorer.services.fleet.engines))
    return explorer


def asked_of(double: EngineDouble) -> list[str]:
    """What the conversations that came to an engine are about."""
    return [received.body["messages"][1]["content"] for received in double.chats]


def test_conversations_stay_with_their_engine_are_shared_out_and_move_when_it_goes(
    two: RunningExplorer, doubles: list[EngineDouble]
) -> None:
    fleet = two.services.fleet
    talks = {f"talk {number}": turn(f"talk {number}") for number in range(4)}
    for number, (name, request) in enumerate(talks.items()):
        other = fleet.engines[1 - number % 2]
        other.in_flight += 1  # so that they are shared out
        assert two.chat(**request).status_code == 200
        other.in_flight -= 1
        talks[name] = next_turn(request, "yes", "go on")
    assert [asked_of(double) for double in doubles] == [["talk 0", "talk 2"], ["talk 1", "talk 3"]]
    for _ in range(3):
        for name, request in talks.items():
            assert two.chat(**request).status_code == 200
            talks[name] = next_turn(request, "yes", "go on")
    assert [asked_of(double) for double in doubles] == [["talk 0", "talk 2"] * 4, ["talk 1", "talk 3"] * 4]
    fleet.engines[1].in_flight += 9
    assert two.chat(**talks["talk 1"]).status_code == 200
    assert asked_of(doubles[0])[-1] == "talk 1"
    fleet.engines[1].in_flight -= 9
    doubles[1].dead = True
    assert two.chat(**talks["talk 3"]).status_code == 200
    assert asked_of(doubles[0])[-1] == "talk 3"


def test_without_affinity_the_least_busy_engine_answers(running_explorer: Run, doubles: list[EngineDouble]) -> None:
    explorer = running_explorer(*doubles, prefix_affinity=False)
    fleet = explorer.services.fleet
    eventually(lambda: all(each.state is EngineState.READY for each in fleet.engines))
    first = turn("hello")
    assert explorer.chat(**first).status_code == 200
    fleet.engines[0].in_flight += 1
    assert explorer.chat(**next_turn(first, "yes", "go on")).status_code == 200
    fleet.engines[0].in_flight -= 1
    assert [len(double.chats) for double in doubles] == [1, 1]
    assert HELLO["model"] == doubles[0].chats[0].body["model"]


@pytest.mark.xdist_group("workers")
def test_the_next_turn_that_comes_to_another_worker_goes_to_the_same_engine(
    tmp_path: Path, doubles: list[EngineDouble]
) -> None:
    urls = {**attached_to(doubles[0]), "explorer__rollout_model__engine_urls": [each.url for each in doubles]}
    with service(write_settings(tmp_path, explorer__workers=2, **urls)) as (process, http), ExitStack() as stack:
        one, other = Staff(tmp_path, process, http, doubles[0]).clients_of_both(stack).values()
        eventually(lambda: 'tuneloop_engines{state="ready"} 2.0' in http.get("/metrics").text)
        for double in doubles:
            double.chats.clear()
        talks = [turn(f"talk {number}") for number in range(12)]
        for request in talks:
            chat(one, **request)
        for request in talks:
            chat(other, **next_turn(request, "yes", "go on"))
    asked = [Counter(asked_of(double)) for double in doubles]
    assert all(asked)
    assert asked[0].keys().isdisjoint(asked[1])
    assert {*asked[0].values(), *asked[1].values()} == {2}


KEYS = [f"default:user-{number}" for number in range(10_000)]


def engine(number: int, version: int, *, in_flight: int = 0, state: EngineState = EngineState.READY) -> Engine:
    made = Engine(number, cast("Any", None))
    made.version, made.in_flight, made.state = version, in_flight, state
    return made


def number(engines: Sequence[Engine], split: TrafficSplit | None, key: str | None) -> int | None:
    found = choose_engine(engines, split, key)
    return found.number if found else None


TRIED = next(key for key in KEYS if TrafficSplit(2, share=0.1).answers(key))
OTHER = next(key for key in KEYS if not TrafficSplit(2, share=0.1).answers(key))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_tried_version_gets_its_share_of_the_keys(share: float) -> None:
    got = sum(TrafficSplit(3, share=share).answers(key) for key in KEYS)
    assert abs(got - share * len(KEYS)) < 5 * math.sqrt(len(KEYS) * share * (1 - share))


def test_a_key_stays_where_it_is_and_goes_over_when_the_share_grows() -> None:
    assert bucket_of(2, "default:anna") == 0.39715205203954207
    assert all(TrafficSplit(2, share=0.5).answers(key) for key in KEYS if TrafficSplit(2, share=0.1).answers(key))


def test_nobody_is_answered_by_a_version_without_a_share() -> None:
    assert not any(TrafficSplit(2, share=0.5).without_traffic().answers(key) for key in KEYS)


def test_the_version_that_is_tried_answers_its_own_and_nobody_else() -> None:
    engines, split = [engine(0, 1, in_flight=9), engine(1, 2)], TrafficSplit(2, share=0.1)
    assert number(engines, split, TRIED) == 1
    assert number(engines, split, OTHER) == 0
    assert number(engines, split, None) == 0


def test_the_champion_stands_in_for_the_version_that_is_tried_but_not_the_other_way_round() -> None:
    split, down = TrafficSplit(2, share=0.1), EngineState.DOWN
    assert number([engine(0, 1), engine(1, 2, state=down)], split, TRIED) == 0
    assert number([engine(0, 1, state=down), engine(1, 2)], split, OTHER) is None
    assert number([engine(0, 1, state=down), engine(1, 2)], split, None) is None
