"""Compressed request bodies, on the routes that sample and on those of FastAPI."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import httpx
import pytest
import zstandard

from tests.doubles.engine import CHAT, EnginePlace
from tests.explorer.running import HELLO, RunningExplorer, explorer_running, settings_for
from tests.explorer.wire import BODY, Wire, chunked, http_request
from tuneloop.explorer.http.bodies import read_body
from tuneloop.explorer.http.encodings import decode_body
from tuneloop.explorer.limits import BodyLimits, KeyMeter, RequestMeter
from tuneloop.shared.errors import RequestRefused
from tuneloop.shared.ledger.keys import KeyLimits

pytestmark = pytest.mark.contract

MAX_BODY = 1 << 20


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def halves(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: compress(data[:9]) + compress(data[9:])


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("X-GZIP", gzip.compress),
    ("gzip, identity", halves(gzip.compress)),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("br", brotli.compress),
    ("zstd", zstd),
    ("zstd", halves(zstd)),
]
MESSAGE = HELLO | {"max_tokens": 5}
BODIES = {
    CHAT: HELLO,
    "/v1/messages": MESSAGE,
    "/v1/responses": {"model": HELLO["model"], "input": "3+4="},
    "/v1/messages/count_tokens": MESSAGE,
    "/feedback": {"msg_ids": ["chatcmpl-a"], "reward": 1.0},
    "/commit": {},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, places: list[EnginePlace]) -> Iterator[RunningExplorer]:
    """One explorer for all: nothing here changes it."""
    double, folder = places[0].fresh(), tmp_path_factory.mktemp("encodings")
    with explorer_running(settings_for(folder, [double.url], max_body_bytes=MAX_BODY)) as explorer:
        yield explorer


def post(explorer: RunningExplorer, path: str, encoding: str, body: bytes) -> httpx.Response:
    return explorer.http.post(path, content=body, headers={"content-encoding": encoding})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("encoding", "compress"), ENCODERS)
def test_a_compressed_body_is_the_body(
    shared: RunningExplorer, path: str, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    body = json.dumps(BODIES[path]).encode()
    plain, compressed = shared.http.post(path, content=body), post(shared, path, encoding, compress(body))
    assert compressed.status_code == plain.status_code, compressed.text
    assert compressed.json().keys() == plain.json().keys()
    assert "not JSON" not in plain.text


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/feedback"])
def test_a_body_that_is_too_large_when_decoded_is_refused(shared: RunningExplorer, path: str) -> None:
    refused = post(shared, path, "zstd", zstd(bytes(64 << 20)))
    assert refused.status_code == 413, refused.text
    assert shared.app.limits.held_bytes == 0


@pytest.mark.parametrize(("encoding", "compress"), ENCODERS)
async def test_a_bomb_is_not_unpacked_whole(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    bomb, limits, largest = compress(bytes(100 << 20)), BodyLimits(), 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bomb, "more_body": False}

    receive_bounded = RequestMeter(limits, KeyMeter(KeyLimits())).receiver(decode_body(receive, [encoding.encode()]))

    async def receive_counted() -> Any:
        nonlocal largest
        message = await receive_bounded()
        largest = max(largest, len(message["body"]))
        return message

    with pytest.raises(RequestRefused) as refused:
        await read_body(receive_counted, str(len(bomb)), MAX_BODY)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    assert largest <= 16 << 20
    assert MAX_BODY < limits.held_bytes <= MAX_BODY + largest


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("encoding", ["lzma", "gzip, zstd", "compress"])
def test_other_encodings_are_415_and_named(shared: RunningExplorer, path: str, encoding: str) -> None:
    refused = post(shared, path, encoding, b"anything")
    assert refused.status_code == 415
    assert encoding in refused.json()["error"]["message"]
    assert refused.headers["accept-encoding"] == "gzip, deflate, br, zstd"


@pytest.mark.parametrize("path", [CHAT, "/feedback"])
@pytest.mark.parametrize(("encoding", "compress"), ENCODERS)
def test_a_broken_or_truncated_body_is_400(
    shared: RunningExplorer, path: str, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    whole = compress(json.dumps(HELLO).encode())
    for broken in (whole[:-1], whole[: len(whole) // 2], b"\xff" + whole[1:], whole + b"{"):
        refused = post(shared, path, encoding, broken)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_content_encoding")
        assert encoding.lower().removesuffix(", identity") in refused.json()["error"]["message"]


def test_a_compressed_body_may_come_in_pieces_and_the_next_request_is_read(shared: RunningExplorer) -> None:
    data = gzip.compress(BODY)
    request = chunked(*(data[at : at + 1] for at in range(len(data))))
    with Wire(shared.url) as wire:
        for _ in range(2):
            wire.send(request.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1))
            assert wire.response().status == 200
        wire.send(http_request(BODY))
        assert wire.response().status == 200


def test_a_client_that_waits_to_be_asked_for_a_compressed_body_is_asked(shared: RunningExplorer) -> None:
    request = http_request(gzip.compress(BODY), "Expect: 100-continue", "Content-Encoding: gzip")
    head, _, body = request.partition(b"\r\n\r\n")
    with Wire(shared.url) as wire:
        wire.send(head + b"\r\n\r\n")
        assert wire.response().status == 100
        wire.send(body)
        assert wire.response().status == 200


def test_an_encoding_without_a_body_does_not_matter(shared: RunningExplorer) -> None:
    for encoding in ("gzip", "br"):
        assert shared.http.get("/v1/models", headers={"content-encoding": encoding}).status_code == 200
        assert post(shared, "/commit", encoding, b"").status_code == 200
