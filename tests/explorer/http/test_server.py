"""HTTP as clients speak it, well and badly, byte by byte."""

import asyncio
import gc
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from tests.doubles.engine import CHAT, EnginePlace
from tests.doubles.serving import serving
from tests.explorer.running import HELLO, RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.wire import BODY, Wire, WireResponse, chunked, http_request, is_closed, streamed
from tuneloop.explorer.edge import ClientRequest, Edge, Http11
from tuneloop.shared.errors import RequestRefused

pytestmark = pytest.mark.contract

HOT = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    """One explorer for all: nothing here changes it."""
    double, folder = places[0].fresh(), tmp_path_factory.mktemp("server")
    with explorer_running(settings_for(folder, [double.url], max_body_bytes=MAX_BODY, request_timeout=6)) as explorer:
        yield explorer


@pytest.fixture
def wire(shared: RunningExplorer) -> Iterator[Wire]:
    with Wire(shared.url) as found:
        yield found


def is_refused(answer: WireResponse, status: int, code: str | None) -> None:
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["message"]
    assert answer.headers["x-request-id"]
    assert answer.headers["date"]
    assert answer.headers["content-type"] == "application/json"


def test_one_connection_serves_many_requests(wire: Wire) -> None:
    for number in range(20):
        wire.send(http_request(streamed() if number % 2 else BODY))
        answer = wire.response()
        assert answer.status == 200
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers["date"])
        assert answer.headers["x-request-id"].startswith("chatcmpl-")
        assert ("transfer-encoding" in answer.headers) == bool(number % 2)


def test_requests_that_come_at_once_are_answered_in_order(wire: Wire) -> None:
    kinds = [
        http_request(),
        http_request(streamed()),
        http_request(b"{"),
        http_request(b"", path="/v1/models", method="GET"),
        chunked(BODY),
    ]
    wire.send(b"".join(kinds * 3))
    for _ in range(3):
        whole, stream, bad, models, last = (wire.response() for _ in kinds)
        assert json.loads(whole.body)["object"] == json.loads(last.body)["object"] == "chat.completion"
        assert stream.body.endswith(b"data: [DONE]\n\n")
        is_refused(bad, 400, "invalid_json")
        assert json.loads(models.body)["object"] == "list"


def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection(shared: RunningExplorer) -> None:
    with Wire(shared.url) as wire:
        wire.send(http_request(version="1.0"))
        answer = wire.response()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert wire.rest() == b""
    with Wire(shared.url) as wire:
        wire.send(http_request(streamed(), version="1.0"))
        answer = wire.response()
        assert "transfer-encoding" not in answer.headers
        assert all(line.startswith(b"data: ") for line in answer.body.split(b"\n\n")[:-1])
        assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "a", "previous_response_id": "y" * 70_000}),
        ("/v1/responses", {"input": [{"type": "y" * 70_000}]}),
        (CHAT, HELLO | {"metadata": {" " * 40_000 + "train": "maybe"}}),
    ],
)
def test_a_refusal_quotes_long_words_in_part(wire: Wire, path: str, fields: dict[str, Any]) -> None:
    wire.socket.settimeout(5)
    for _ in range(2):
        wire.send(http_request(json.dumps(fields).encode(), path=path))
        answer = wire.response()
        assert answer.status in {400, 404}
        assert len(answer.body) < 5000


def test_a_client_that_closes_after_one_request_is_told_so_and_closed(wire: Wire) -> None:
    wire.send(http_request(streamed(), "Connection: close"))
    assert wire.response().headers["connection"] == "close"
    assert wire.rest() == b""


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(wire: Wire) -> None:
    head, _, body = http_request(BODY, "Expect: 100-continue").partition(b"\r\n\r\n")
    for _ in range(2):
        wire.send(head + b"\r\n\r\n")
        assert wire.response().status == 100
        wire.send(body)
        assert wire.response().status == 200


def test_a_client_that_would_send_too_much_is_not_asked_for_it(wire: Wire) -> None:
    wire.send(http_request(b"x" * (MAX_BODY + 1), "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    answer = wire.response()
    is_refused(answer, 413, "body_too_large")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("size", [MAX_BODY + 1, 16 * MAX_BODY])
def test_a_client_that_sends_too_much_is_told_so(wire: Wire, size: int) -> None:
    wire.send(http_request(b" " * size))
    is_refused(wire.response(), 413, "body_too_large")


def test_too_much_in_chunks_is_refused_and_ends(wire: Wire) -> None:
    head, block = chunked().partition(b"0\r\n\r\n")[0], b"10000\r\n" + b" " * 65536 + b"\r\n"
    wire.send(head + 40 * block)
    answer = wire.response()
    is_refused(answer, 413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert is_closed(wire, block)


def test_httpx_and_curl_are_told_that_they_send_too_much(shared: RunningExplorer, tmp_path: Path) -> None:
    assert shared.http.post(CHAT, content=b" " * 20 * MAX_BODY).status_code == 413
    big = tmp_path / "big"
    big.write_bytes(b" " * 20 * MAX_BODY)
    if curl := shutil.which("curl"):
        reply = subprocess.run(
            [curl, "-s", "--data-binary", f"@{big}", shared.url + CHAT], capture_output=True, check=False
        )
        assert json.loads(reply.stdout)["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(wire: Wire) -> None:
    wire.send(http_request()[:-1])
    is_refused(wire.response(), 408, "body_timeout")


@pytest.mark.parametrize("path", HOT)
@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
def test_another_method_is_refused(wire: Wire, path: str, method: str) -> None:
    for _ in range(2):
        wire.send(http_request(b"", path=path, method=method))
        answer = wire.response(head=method == "HEAD")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, POST" if path == CHAT else "POST")
        assert answer.headers["x-request-id"]
        if method != "HEAD":
            error = json.loads(answer.body)["error"]
            assert error.keys() == ({"type", "message"} if "messages" in path else {"message", "type", "param", "code"})


@pytest.mark.parametrize("case", [str.upper, str.lower, str.title])
def test_headers_may_be_written_in_any_case(wire: Wire, case: Any) -> None:
    head, _, body = http_request(BODY, "x-request-id: Mine").partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    named = [case(line.partition(":")[0]) + ":" + line.partition(":")[2] for line in lines]
    wire.send("\r\n".join([first, *named]).encode() + b"\r\n\r\n" + body)
    answer = wire.response()
    assert (answer.status, answer.headers["x-request-id"]) == (200, "Mine")


def test_long_headers_are_taken_and_longer_ones_refused(shared: RunningExplorer) -> None:
    with Wire(shared.url) as wire:
        for _ in range(3):  # each counts for itself
            long = http_request(BODY, f"x-long: {'x' * 40_000}")
            wire.send(long[:30_000])
            time.sleep(0.02)
            wire.send(long[30_000:])
            assert wire.response().status == 200
    for endless in (b"x" * 4096, b"x-a: b\r\n" * 512):
        with Wire(shared.url) as wire:
            wire.send(f"POST {CHAT} HTTP/1.1\r\nx-long: ".encode())
            assert is_closed(wire, endless)
    with Wire(shared.url) as wire:
        wire.send(f"POST {CHAT} HTTP/1.1\r\nx-long: ".encode() + b"x" * 70_000)
        is_refused(wire.response(), 431, "headers_too_large")
        assert wire.rest() == b""


NO_HTTP = [
    b"garbage\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nx-request-id: a\0b\r\n\r\n",
    b"POST \xff\xff HTTP/1.1\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("data", NO_HTTP)
def test_what_is_no_http_is_refused_and_closed(wire: Wire, data: bytes) -> None:
    wire.send(data)
    answer = wire.response()
    is_refused(answer, 400, "invalid_http")
    assert answer.headers["connection"] == "close"
    assert wire.rest() == b""


def test_nothing_is_written_into_an_answer_that_is_under_way(
    places: list[EnginePlace], shared: RunningExplorer, wire: Wire
) -> None:
    double = places[0].double
    double.piece_pause_s = 0.1
    wire.send(http_request(streamed()))
    assert wire.response(head=True).status == 200
    wire.send(b"garbage\r\n\r\n")
    answer, _, refusal = wire.rest().partition(b"0\r\n\r\n")
    assert b"HTTP/1.1" not in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n")
    assert refusal.startswith(b"HTTP/1.1 400")
    double.piece_pause_s = 0
    eventually(lambda: shared.services.proxy.admission.in_flight == 0)


def test_more_than_was_announced_is_not_taken_for_a_body(shared: RunningExplorer, wire: Wire) -> None:
    wire.send(http_request().replace(b"content-length: %d" % len(BODY), b"content-length: %d" % (len(BODY) - 1)))
    is_refused(wire.response(), 400, "invalid_json")
    is_refused(wire.response(), 400, "invalid_http")
    assert wire.rest() == b""
    eventually(lambda: shared.services.proxy.admission.in_flight == 0)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "anything"])
def test_a_wish_to_upgrade_is_not_fulfilled_and_harms_nothing(wire: Wire, upgrade: str) -> None:
    wishes = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMAAABkAAQAAP__"]
    more = ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]
    for _ in range(2):
        wire.send(http_request(BODY, *wishes, *more))
        assert wire.response().status == 200
    for byte in (sent := chunked(BODY).replace(b"host: localhost", "\r\n".join(wishes).encode())):
        wire.send(bytes([byte]))
    assert len(sent) > len(BODY)
    assert wire.response().status == 200
    wire.send(http_request(BODY, *wishes) + http_request(streamed(), *wishes) + http_request())
    assert [wire.response().status for _ in range(3)] == [200] * 3
    wire.send(http_request(b"", *wishes, *more, path="/health", method="GET"))
    assert wire.response().status == 200


def test_a_tunnel_is_refused(wire: Wire) -> None:
    wire.send(b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n")
    assert wire.response().status in {400, 404, 405}


def test_an_absolute_url_is_understood(wire: Wire) -> None:
    wire.send(http_request(path=f"http://elsewhere{CHAT}?a=b"))
    assert wire.response().status == 200


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data(), chunk=st.integers(0, 40), stream=st.booleans())
def test_no_cut_of_the_bytes_changes_a_request(
    shared: RunningExplorer, places: list[EnginePlace], data: Any, chunk: int, stream: bool
) -> None:
    body = streamed() if stream else BODY
    sent = chunked(*(body[at : at + chunk] for at in range(0, len(body), chunk))) if chunk else http_request(body)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=8)))
    with Wire(shared.url) as wire:
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            wire.send(sent[start:end])
            time.sleep(0.0005)
        assert wire.response().status == 200
        assert places[0].double.chats[-1].body["messages"] == HELLO["messages"]
        wire.send(http_request())
        assert wire.response().status == 200


def test_a_request_may_come_byte_by_byte(wire: Wire) -> None:
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for sent in (http_request(), chunked(*(BODY[at : at + 1] for at in range(len(BODY))))):
        for at in range(len(sent)):
            wire.send(sent[at : at + 1])
        assert wire.response().status == 200


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(noise=st.binary(max_size=60), at=st.integers(0, 120), keeps=st.booleans())
def test_whatever_bytes_come_others_are_served(shared: RunningExplorer, noise: bytes, at: int, keeps: bool) -> None:
    whole = http_request()
    with Wire(shared.url) as wire:
        wire.send(whole[:at] + noise + (whole[at:] if keeps else b""))
        wire.socket.shutdown(socket.SHUT_WR)
        try:
            reply = wire.rest()
        except ConnectionResetError:
            reply = b""
    assert re.match(rb"|HTTP/1.1 [1234]\d\d ", reply)
    assert b"Traceback" not in reply
    assert shared.http.get("/health").status_code == 200


@pytest.mark.parametrize("value", ["order-1001", "caf\xe9 \xff", "a b; c=d", "x" * 2000])
def test_a_requests_name_comes_back_as_it_was(wire: Wire, value: str) -> None:
    for request in (
        http_request,
        lambda *more: http_request(streamed(), *more[1:]),
        lambda *more: http_request(b"{", *more[1:]),
    ):
        wire.send(request(BODY, f"x-request-id: {value}"))
        assert wire.response().headers["x-request-id"] == value
    wire.send(http_request(b"", f"X-Request-ID: {value}", path="/v1/models", method="GET"))
    assert wire.response().headers["x-request-id"] == value


@pytest.mark.parametrize("value", ["a\r\n set-cookie: b", "a\r set-cookie: b", "a\n set-cookie: b"])
def test_a_requests_name_brings_no_header_in(wire: Wire, value: str) -> None:
    wire.send(http_request(BODY, f"x-request-id: {value}"))
    assert "set-cookie" not in wire.response().headers


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nowhere", "/feedback", "/v1/messages/count"])
def test_every_answer_has_a_name_and_a_date(wire: Wire, path: str) -> None:
    wire.send(http_request(b"", path=path, method="GET"))
    answer = wire.response()
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["date"]


def test_http_client_and_curl_read_whole_and_streamed(shared: RunningExplorer) -> None:
    parts = urlsplit(shared.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    for body, ending in ((BODY, b"}"), (streamed(), b"data: [DONE]\n\n")):
        connection.request("POST", CHAT, body)
        assert connection.getresponse().read().endswith(ending)
        if curl := shutil.which("curl"):
            for version in ("--http1.0", "--http1.1", "--http2"):
                command = [curl, "-sS", version, "-d", body, shared.url + CHAT]
                answer = subprocess.run(command, capture_output=True, check=True)
                assert answer.stdout.endswith(ending)
    connection.close()


async def read_all(request: ClientRequest) -> None:
    await request.respond(200, [], b"%d" % len(await request.body(MAX_BODY)))


async def test_connections_hold_nothing_longer_than_they_must() -> None:
    config, state = uvicorn.Config(Edge(None, {CHAT: read_all}), ws="none", lifespan="off"), ServerState()
    protocols: weakref.WeakSet[Http11] = weakref.WeakSet()

    def create_protocol() -> Http11:
        protocols.add(made := Http11(config, state, {}))
        return made

    server = await asyncio.get_running_loop().create_server(create_protocol, "127.0.0.1", 0)
    gc.disable()
    try:
        for number in range(1, 4):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for _ in range(2):
                writer.write(http_request(b" " * 300_000))
                await reader.readuntil(b"300000")
            assert [len(each.cycle.body) for each in protocols] == [0]
            if number % 2:
                writer.write(http_request() + http_request()[:-1])
            writer.close()
            await writer.wait_closed()
            async with asyncio.timeout(5):
                while protocols:  # noqa: ASYNC110 - the collector, which is off, must not be needed
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
        server.close()


begun: list[str] = []


async def bug(request: ClientRequest) -> None:
    raise ZeroDivisionError("a secret")


async def late_bug(request: ClientRequest) -> None:
    await request.start(200, [])
    request.write(b"said")
    raise ZeroDivisionError("a secret")


async def late_end(request: ClientRequest) -> None:
    await request.start(200, [])
    request.write(b"said")
    begun.append("late_end")
    await asyncio.sleep(0.3)
    await request.end_stream(b" all")


async def never(request: ClientRequest) -> None:
    begun.append("never")
    await asyncio.sleep(60)


async def long_refusal(request: ClientRequest) -> None:
    raise RequestRefused("no", extra={"why": "x" * 1_000_000})


WAYS = {f"/{way.__name__}": way for way in (bug, late_bug, late_end, long_refusal, never)} | {"/v1/messages": bug}


def test_a_bug_is_logged_and_told_without_its_insides() -> None:
    with capture_logs() as logs, serving(Edge(FastAPI(), WAYS)) as url:
        answer = httpx.post(f"{url}/bug", headers={"x-request-id": "mine"}, timeout=60)
        anthropic = httpx.post(f"{url}/v1/messages", timeout=60).json()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "api_error")
    assert [(each["event"], each["exc_info"]) for each in logs] == [("request_failed", True)] * 2


def test_a_refusal_of_any_length_is_sent_in_full_and_the_connection_serves_on() -> None:
    with serving(Edge(FastAPI(), WAYS)) as url, httpx.Client(base_url=url, timeout=5) as client:
        for _ in range(2):
            answer = client.post("/long_refusal")
            assert (answer.status_code, len(answer.json()["why"])) == (400, 1_000_000)


def test_a_bug_in_mid_answer_breaks_it_off() -> None:
    with capture_logs() as logs, serving(Edge(FastAPI(), WAYS)) as url:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            httpx.post(f"{url}/late_bug", timeout=60)
        assert logs[0]["event"] == "answer_broken_off"


def test_a_server_that_stops_ends_what_it_can_and_tells_the_others() -> None:
    answer: dict[str, httpx.Response] = {}

    def ask(path: str) -> None:
        answer[path] = httpx.post(url + path, timeout=10)

    with serving(Edge(FastAPI(), WAYS), drain_s=1) as url:
        asking = [threading.Thread(target=ask, args=(path,)) for path in ("/late_end", "/never")]
        for each in asking:
            each.start()
        eventually(lambda: len(begun) == 2)
    for each in asking:
        each.join()
    assert answer["/late_end"].content == b"said all"
    assert (answer["/never"].status_code, answer["/never"].json()["error"]["code"]) == (503, "stopping")
    assert answer["/never"].headers["retry-after"] == "1"
