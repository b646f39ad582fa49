"""What clients who read nothing of their replies take of the service, and for how long."""

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.serving import serving
from tests.explorer.running import RunningExplorer, eventually, explorer_running, settings_for
from tests.explorer.wire import BODY, http_request
from tuneloop.explorer.limits import BodyLimits

pytestmark = pytest.mark.contract

SIZE = 24 << 20  # more than the system takes of it

STREAM = BODY[:-1] + b', "stream": true}'


@dataclass
class EndlessDouble(EngineDouble):
    """Its streams go on until their client leaves."""

    async def _stream(self, reply: list[bytes], send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": reply[0], "more_body": True})
        said = next(each for each in reply if re.search(rb'"delta":.*"content":"[^"]', each))
        piece = re.sub(rb'"content":"[^"]*"', b'"content":"%b"' % (b"x" * 20_000), said)
        while True:
            await send({"type": "http.response.body", "body": piece * 10, "more_body": True})
            await asyncio.sleep(0)  # else nothing would hear that the client has left


@pytest.fixture
def double() -> Iterator[EngineDouble]:
    found = EndlessDouble(says={"models": "x" * SIZE})
    with serving(found) as found.url:
        yield found


@pytest.fixture
def explorer(tmp_path: Path, double: EngineDouble) -> Iterator[RunningExplorer]:
    with explorer_running(
        settings_for(tmp_path, [double.url], max_held_bytes=3 * SIZE // 2, request_timeout=600)
    ) as found:
        yield found


def limits(explorer: RunningExplorer) -> BodyLimits:
    return explorer.app.limits


@contextmanager
def asking(explorer: RunningExplorer, data: bytes) -> Iterator[socket.socket]:
    """A connection on which this was sent, and nothing is read."""
    parts = urlsplit(explorer.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(data)
        yield connection


def in_flight(explorer: RunningExplorer) -> int:
    return explorer.services.proxy.admission.in_flight


def test_a_whole_reply_is_held_while_it_is_read_and_takes_no_engines_place_meanwhile(explorer: RunningExplorer) -> None:
    with asking(explorer, http_request(BODY)):
        eventually(lambda: limits(explorer).held_bytes > SIZE and in_flight(explorer) == 0)
        answer = explorer.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    eventually(lambda: limits(explorer).held_bytes == 0)
    assert len(explorer.chat().json()["choices"][0]["message"]["content"]) == SIZE
    explorer.until_flushed()
    assert len(explorer.exchanges()) == 2  # what was refused is not stored


def test_a_whole_reply_that_nobody_reads_is_not_held_for_ever(explorer: RunningExplorer) -> None:
    explorer.app.connections.read_timeout_s = 0.2
    with asking(explorer, http_request(BODY)) as connection:
        eventually(lambda: limits(explorer).held_bytes > SIZE)
        eventually(lambda: limits(explorer).held_bytes == 0)
        assert is_cut(connection)


def is_cut(connection: socket.socket) -> bool:
    """Whether less than all of a whole reply comes."""
    count = 0
    try:
        while piece := connection.recv(1 << 20):
            count += len(piece)
    except ConnectionError:
        pass
    return count < SIZE


def test_a_stream_that_nobody_reads_ends_as_if_its_client_had_left(
    explorer: RunningExplorer, double: EngineDouble
) -> None:
    explorer.app.connections.read_timeout_s = 0.2
    with asking(explorer, http_request(STREAM)):
        eventually(lambda: double.left == 1)
        eventually(lambda: in_flight(explorer) == 0)
    explorer.until_flushed()
    [exchange] = explorer.exchanges()
    assert exchange.experiences[0].drop_reason == "cut_off"
