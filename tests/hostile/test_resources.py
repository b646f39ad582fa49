"""Strangers who take what others need: memory, connections, the tokenizer, time. A neighbour is answered meanwhile."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.doubles.engine import CHAT, MODEL
from tests.doubles.serving import serving
from tests.explorer.running import eventually
from tests.explorer.wire import Wire
from tests.hostile.bed import ADMIN_KEY, Bed, asking, bed_with, fresh_name
from tests.hostile.echo import EchoDouble

CONNECTIONS = 40
HELD = 48 << 20

_HOST = b"Host: 127.0.0.1\r\n"
_CHUNKED = f"POST {CHAT} HTTP/1.1\r\n".encode() + _HOST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def echo() -> Iterator[EchoDouble]:
    double = EchoDouble()
    with serving(double) as double.url:
        yield double


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, echo: EchoDouble) -> Iterator[Bed]:
    limits = {"max_connections": CONNECTIONS, "max_held_bytes": HELD, "head_timeout": 2, "body_timeout": 2}
    with bed_with(tmp_path_factory.mktemp("resources"), [echo.url], **limits) as found:
        yield found
        found.is_sound()


@pytest.fixture
def neighbour(bed: Bed) -> Iterator[httpx.Client]:
    """Somebody with a kept connection, who has asked before and goes on afterwards."""
    with httpx.Client(base_url=bed.url, timeout=30) as client:
        bed.ask(client)
        yield client
        bed.ask(client)


def most_memory(bed: Bed) -> int:
    """The most bytes that the worker has had at any time."""
    [worker] = bed.workers()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def connected(bed: Bed) -> socket.socket:
    parts = urlsplit(bed.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def is_closed(connection: socket.socket) -> bool:
    """Whether the service closes the connection, whatever it says before."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def post(client: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return client.post(path, content=body, headers={"Content-Type": "application/json"})


def test_trailers_take_no_memory(bed: Bed, neighbour: httpx.Client) -> None:
    body = json.dumps(asking(fresh_name())).encode()
    before = most_memory(bed)
    with connected(bed) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(_CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + b"a:b\r\n" * 4_000_000)
        assert is_closed(stranger)
    assert most_memory(bed) - before < 32 << 20


def test_a_trailer_is_no_key(bed: Bed, neighbour: httpx.Client) -> None:
    head = _CHUNKED.replace(f"POST {CHAT}".encode(), b"GET /admin/versions")
    with Wire(bed.url) as wire:
        wire.send(head + b"1\r\nx\r\n0\r\n" + f"Authorization: Bearer {ADMIN_KEY}\r\n\r\n".encode())
        assert wire.response().status in {400, 401, 403}
    assert bed.http.get("/admin/versions", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


def test_long_texts_are_not_tokenized_and_others_wait_for_each_other_only(
    bed: Bed, echo: EchoDouble, neighbour: httpx.Client
) -> None:
    text: dict[str, Any] = {"model": MODEL, "prompt": "x" * 3_000_000}
    assert neighbour.post("/tokenize", json=text).status_code == 413
    done: list[int] = []
    echo.text_pause_s, echo.most_texts = 1.0, 0

    def tokenize() -> None:
        done.append(httpx.post(f"{bed.url}/tokenize", json=text | {"prompt": "x" * 400_000}, timeout=60).status_code)

    threads = [threading.Thread(target=tokenize) for _ in range(6)]
    try:
        for each in threads:
            each.start()
        eventually(lambda: echo.texts > 0)
        bed.ask(neighbour)
        assert len(done) < 6
    finally:
        for each in threads:
            each.join()
        echo.text_pause_s = 0.0
    assert done == [200] * 6
    assert echo.most_texts == 1


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"1,", b'"a",'])
def test_a_body_of_very_many_values_takes_little_more_than_its_bytes(
    bed: Bed, neighbour: httpx.Client, piece: bytes
) -> None:
    room = 15 << 20
    before = most_memory(bed)
    body = b'{"model": "t", "messages": [%b0]}' % (piece * (room // len(piece)))
    answer = post(neighbour, CHAT, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values")
    assert most_memory(bed) - before < 100 << 20


def test_bodies_that_never_end_are_held_up_to_a_bound(bed: Bed, neighbour: httpx.Client) -> None:
    before = most_memory(bed)
    head = f"POST {CHAT} HTTP/1.1\r\n".encode() + _HOST + b"Content-Length: 8000000\r\n\r\n"
    with ExitStack() as stack:
        strangers = [stack.enter_context(connected(bed)) for _ in range(24)]
        for each in strangers:
            with suppress(OSError):
                each.sendall(head + b" " * 7_900_000)
        refused = [each for each in strangers if b"overloaded" in _first(each)]
        assert refused
        assert all(is_closed(each) for each in strangers)
    assert most_memory(bed) - before < 4 * HELD


def _first(connection: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return connection.recv(1 << 16)
    return b""


def test_idle_connections_make_room_for_newcomers(bed: Bed, neighbour: httpx.Client) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(bed)) for _ in range(6 * CONNECTIONS)]
        for number in range(20):
            bed.ask(neighbour)
            with httpx.Client(base_url=bed.url, timeout=30) as newcomer:
                bed.ask(newcomer, stream=False)
            assert number < len(idle)
        assert all(is_closed(each) for each in idle)


def test_what_comes_too_slowly_is_ended_and_who_has_half_closed_too(bed: Bed, neighbour: httpx.Client) -> None:
    body = json.dumps(asking(fresh_name())).encode()
    length = f"POST {CHAT} HTTP/1.1\r\n".encode() + _HOST + b"Content-Length: %d\r\n" % len(body)
    beginnings = [
        b"",
        b"\r\n",
        b"P",
        length,
        length + b"\r\n",
        length + b"\r\n" + body[:-1],
        _CHUNKED,
        _CHUNKED + b"5\r\na",
    ]
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(bed)) for _ in beginnings]
        half = [stack.enter_context(connected(bed)) for _ in beginnings]
        for beginning, one, other in zip(beginnings, slow, half, strict=True):
            one.sendall(beginning)
            other.sendall(beginning)
            other.shutdown(socket.SHUT_WR)
        for _ in range(10):
            bed.ask(neighbour)
            for each in slow[2:5]:
                with suppress(OSError):
                    each.sendall(b"x")
            time.sleep(0.05)
        assert all(is_closed(each) for each in half + slow)


def test_upgrades_in_a_row_are_read_one_by_one(bed: Bed, neighbour: httpx.Client) -> None:
    upgrade = b"GET /health HTTP/1.1\r\n" + _HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    before = len(bed.log)
    with Wire(bed.url) as wire:
        wire.send(upgrade * 1000)
        assert [wire.response().status for _ in range(1000)] == [200] * 1000
    assert len(bed.log) - before < 10_000
