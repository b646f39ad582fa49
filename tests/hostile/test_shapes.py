"""Strangers' requests before the service, directly and behind two proxies: whoever comes next gets his own answer."""

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import httpx
import pytest

from tests.doubles.serving import serving
from tests.hostile.bed import Bed, bed_with, fresh_name
from tests.hostile.echo import EchoDouble, reply_to
from tests.hostile.fronts import Front, front_before
from tests.hostile.shapes import ATTACK, HIDDEN, Shape, shapes

pytestmark = pytest.mark.contract

#: A connection on which nothing comes for so long is left.
_QUIET_S = 0.08
_LATE_S = 10.0


@dataclass
class Site:
    """A front before the service, and a client of it whose connection is kept."""

    kind: Front
    url: str
    bed: Bed
    echo: EchoDouble
    neighbour: httpx.Client


@pytest.fixture(scope="module")
def echo() -> Iterator[EchoDouble]:
    double = EchoDouble()
    with serving(double) as double.url:
        yield double


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, echo: EchoDouble) -> Iterator[Bed]:
    with bed_with(tmp_path_factory.mktemp("shapes"), [echo.url], max_body_bytes=1 << 20) as found:
        yield found
        found.is_sound()


@pytest.fixture(scope="module", params=["direct", "nginx", "haproxy"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bed: Bed, echo: EchoDouble
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp(request.param)
    with front_before(bed.url, request.param, folder) as url, httpx.Client(base_url=url, timeout=20) as neighbour:
        yield Site(request.param, url, bed, echo, neighbour)


class Stranger:
    """A connection of somebody who sends a shape, and all that has come back on it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=_LATE_S)
        self.got = b""
        self._ended = False

    def send(self, shape: Shape, data: bytes) -> None:
        with suppress(ConnectionError):  # it was refused before all of it was sent
            self._socket.sendall(data)
            if shape.ends:
                self._socket.shutdown(socket.SHUT_WR)

    def listen(self, quiet_s: float = _QUIET_S) -> None:
        """Read until the other side closes, or is quiet."""
        while not self._ended and select.select([self._socket], [], [], quiet_s)[0]:
            try:
                piece = self._socket.recv(1 << 20)
            except ConnectionError:
                piece = b""
            self.got += piece
            self._ended = not piece

    def hears(self, text: bytes, times: Callable[[], int]) -> bool:
        """Whether a text comes as often as it is said until then, or the connection ends before."""
        deadline = time.monotonic() + _LATE_S
        while True:
            said, heard = times(), self.got.count(text)
            if heard >= said or self._ended or time.monotonic() >= deadline:
                return heard == said or (self._ended and heard < said)
            self.listen(0.05)

    def statuses(self) -> list[int]:
        return [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d{3})", self.got)]

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_whoever_comes_next_gets_his_own_answer(site: Site, shape: Shape) -> None:
    attack, hidden = fresh_name().encode(), fresh_name().encode()
    site.bed.ask(site.neighbour)
    stranger = Stranger(site.url)
    try:
        stranger.send(shape, shape.data.replace(ATTACK, attack).replace(HIDDEN, hidden))
        stranger.listen()
        for _ in range(2):
            site.bed.ask(site.neighbour)
        # What was taken for a request of his is answered to nobody but him.
        for name in (attack, hidden):
            times = partial(site.echo.asked.count, name.decode())
            assert stranger.hears(reply_to(name.decode()).encode(), times), stranger.got
        if site.kind == "direct":
            assert [each for each in stranger.statuses() if each >= 500] == []
    finally:
        stranger.close()
