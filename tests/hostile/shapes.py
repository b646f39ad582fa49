"""Requests of strangers that are cut, framed or named otherwise than requests are, byte by byte.

Each shape has `ATTACK` for the id of the request itself and, where another request hides in it, `HIDDEN` for its id.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

from tests.doubles.engine import CHAT
from tests.hostile.bed import ADMIN_KEY, asking

ATTACK, HIDDEN = b"nAAAAAAA", b"nHHHHHHH"

BODY = json.dumps(asking(ATTACK.decode())).encode()
_START = f"POST {CHAT} HTTP/1.1\r\n".encode()
_HOST = b"Host: 127.0.0.1\r\n"
_LENGTH = b"Content-Length: %d\r\n" % len(BODY)
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_PLAIN = _START + _HOST + _LENGTH
_PIECES = _START + _HOST + _CHUNKED
_LAST = b"0\r\n\r\n"


class Shape(NamedTuple):
    """What is sent at once. `ends`: then the client says that it sends no more."""

    name: str
    data: bytes
    ends: bool = False


def chunk(data: bytes = BODY, *, size: bytes | None = None) -> bytes:
    return b"%b\r\n%b\r\n" % (size or b"%x" % len(data), data)


def _request(name: bytes) -> bytes:
    body = BODY.replace(ATTACK, name)
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (_START, _HOST, len(body), body)


_HIDDEN_REQUEST = _request(HIDDEN)


def shapes() -> list[Shape]:
    """All of them."""
    groups = (_lengths, _encodings, _lines, _chunks, _trailers, _upgrades, _targets, _ends)
    return [each for group in groups for shape in group() for each in _with_and_without(shape)]


def _with_and_without(shape: Shape) -> Iterator[Shape]:
    """A shape, and what is left of it without the request that follows it: then the next one is a neighbour's."""
    yield shape
    if shape.data.endswith(_HIDDEN_REQUEST):
        yield Shape(f"{shape.name}-alone", shape.data.removesuffix(_HIDDEN_REQUEST))


def _lengths() -> Iterator[Shape]:
    inside = _LAST + _HIDDEN_REQUEST
    both = _START + _HOST + _CHUNKED
    yield Shape("cl-te", both + b"Content-Length: %d\r\n\r\n" % len(inside) + inside)
    yield Shape(
        "cl-te-other-order", _START + _HOST + b"Content-Length: %d\r\n" % len(inside) + _CHUNKED + b"\r\n" + inside
    )
    yield Shape("te-cl", both + b"Content-Length: 4\r\n\r\n" + chunk(_HIDDEN_REQUEST) + _LAST)
    yield Shape("te-cl-whole", both + _LENGTH + b"\r\n" + chunk() + _LAST)
    yield Shape("length-twice", _PLAIN + _LENGTH + b"\r\n" + BODY)
    yield Shape("lengths-differ", _PLAIN + b"Content-Length: 0\r\n\r\n" + BODY + _HIDDEN_REQUEST)
    yield Shape("lengths-differ-other-order", _START + _HOST + b"Content-Length: 0\r\n" + _LENGTH + b"\r\n" + BODY)
    size = b"%d" % len(BODY)
    for name, value in {
        "listed": b"%b, %b" % (size, size),
        "listed-differently": b"%b, 0" % size,
        "plus": b"+" + size,
        "minus": b"-" + size,
        "hex": b"0x" + b"%x" % len(BODY),
        "zeros": b"0" * 30 + size,
        "too-large": b"%d" % ((1 << 64) + len(BODY)),
        "tab": b"\x0b" + size,
        "space-inside": size[:1] + b" " + size[1:],
        "empty": b"",
        "words": b"all of it",
        "fraction": size + b".0",
    }.items():
        yield Shape(f"length-{name}", _START + _HOST + b"Content-Length: %b\r\n\r\n" % value + BODY + _HIDDEN_REQUEST)
    yield Shape("length-too-short", _START + _HOST + b"Content-Length: 5\r\n\r\n" + BODY)
    yield Shape(
        "get-with-a-body",
        b"GET /health HTTP/1.1\r\n" + _HOST + b"Content-Length: %d\r\n\r\n" % len(_HIDDEN_REQUEST) + _HIDDEN_REQUEST,
    )
    yield Shape(
        "get-with-chunks", b"GET /health HTTP/1.1\r\n" + _HOST + _CHUNKED + b"\r\n" + chunk(_HIDDEN_REQUEST) + _LAST
    )
    yield Shape(
        "head-with-a-body",
        f"HEAD {CHAT} HTTP/1.1\r\n".encode()
        + _HOST
        + b"Content-Length: %d\r\n\r\n" % len(_HIDDEN_REQUEST)
        + _HIDDEN_REQUEST,
    )


def _encodings() -> Iterator[Shape]:
    inside = chunk() + _LAST
    for name, line in {
        "x": b"Transfer-Encoding: xchunked",
        "space-before-colon": b"Transfer-Encoding : chunked",
        "identity-after": b"Transfer-Encoding: chunked, identity",
        "identity-before": b"Transfer-Encoding: identity, chunked",
        "identity": b"Transfer-Encoding: identity",
        "tab": b"Transfer-Encoding:\tchunked",
        "vertical-tab": b"Transfer-Encoding:\x0bchunked",
        "upper-case": b"TRANSFER-ENCODING: CHUNKED",
        "quoted": b'Transfer-Encoding: "chunked"',
        "hidden-by-a-line": b"X: X\nTransfer-Encoding: chunked",
        "hidden-by-a-return": b"X: X\rTransfer-Encoding: chunked",
        "folded": b"Transfer-Encoding:\r\n chunked",
        "twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "two": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "gzip": b"Transfer-Encoding: gzip, chunked",
        "empty": b"Transfer-Encoding:",
        "nul": b"Transfer-Encoding: chunked\0",
        "underscore": b"Transfer_Encoding: chunked",
    }.items():
        yield Shape(f"encoding-{name}", _START + _HOST + line + b"\r\n\r\n" + inside + _HIDDEN_REQUEST)
        yield Shape(f"encoding-{name}-and-length", _PLAIN + line + b"\r\n\r\n" + inside + _HIDDEN_REQUEST)
    yield Shape("encoding-http-1.0", (_PIECES + b"\r\n").replace(b"/1.1", b"/1.0", 1) + inside + _HIDDEN_REQUEST)


def _lines() -> Iterator[Shape]:
    request = _PLAIN + b"\r\n"
    yield Shape("bare-lf", request.replace(b"\r\n", b"\n") + BODY)
    yield Shape("bare-cr", request.replace(b"\r\n", b"\r") + BODY)
    yield Shape("bare-lf-at-the-end-of-the-head", _PLAIN + b"\n" + BODY)
    yield Shape("lf-cr", request.replace(b"\r\n", b"\n\r") + BODY)
    yield Shape("head-hidden-by-bare-lf", _START + _HOST + b"X: y\n\n" + _HIDDEN_REQUEST)
    for name, line in {
        "folded": b"X: a\r\n b: c",
        "folded-first": b" X: a",
        "folded-length": b"Content-Length:\r\n 0",
        "no-colon": b"nothing",
        "no-name": b": value",
        "space-in-the-name": b"X Y: z",
        "nul-in-the-name": b"X\0Y: z",
        "nul": b"X: y\0z",
        "eight-bit": b"X\xff: \xfe",
        "del": b"X: \x7f",
        "long": b"X: " + b"y" * 100_000,
        "very-long-name": b"X" * 100_000 + b": y",
    }.items():
        yield Shape(f"header-{name}", _PLAIN + line + b"\r\n\r\n" + BODY)
    yield Shape(
        "very-many-headers", _PLAIN + b"".join(b"X%d: y\r\n" % number for number in range(10_000)) + b"\r\n" + BODY
    )
    yield Shape("empty-lines-first", b"\r\n" * 50 + request + BODY)
    yield Shape("garbage-first", b"\x16\x03\x01\x02\x00" + request + BODY)
    yield Shape("nothing-but-garbage", bytes(range(256)) * 20)


def _chunks() -> Iterator[Shape]:
    size = b"%x" % len(BODY)
    for name, written in {
        "extension": size + b";a=b",
        "quoted-extension": size + b';a="b;c"',
        "long-extension": size + b";a=" + b"b" * 100_000,
        "extension-with-bare-lf": size + b";a\n",
        "extension-with-bare-cr": size + b";a\rb",
        "hex-prefix": b"0x" + size,
        "plus": b"+" + size,
        "minus": b"-" + size,
        "space-before": b" " + size,
        "space-after": size + b" ",
        "zeros": b"0" * 30 + size,
        "upper-case": size.upper(),
        "too-large": b"FFFFFFFFFFFFFFFF" + size,
        "huge": b"7FFFFFFFFFFFFFFF",
        "empty": b"",
        "words": b"xyz",
        "larger": b"%x" % (len(BODY) + 5),
        "smaller": b"%x" % (len(BODY) - 5),
    }.items():
        inside = b"%b\r\n%b\r\n" % (written, BODY) + _LAST
        yield Shape(f"chunk-size-{name}", _PIECES + b"\r\n" + inside + _HIDDEN_REQUEST)
    yield Shape("chunk-after-bare-lf", _PIECES + b"\r\n" + size + b"\n" + BODY + b"\n0\n\n" + _HIDDEN_REQUEST)
    yield Shape("chunk-without-end-of-line", _PIECES + b"\r\n" + size + b"\r\n" + BODY + _LAST)
    yield Shape("last-chunk-with-zeros", _PIECES + b"\r\n" + chunk() + b"000000\r\n\r\n")
    yield Shape("last-chunk-with-extension", _PIECES + b"\r\n" + chunk() + b"0;a=b\r\n\r\n")
    yield Shape("last-chunk-with-bare-lf", _PIECES + b"\r\n" + chunk() + b"0\n\n" + _HIDDEN_REQUEST)
    yield Shape("bytes-as-chunks", _PIECES + b"\r\n" + b"".join(chunk(bytes([each])) for each in BODY) + _LAST)


def _trailers() -> Iterator[Shape]:
    for name, lines in {
        "one": b"X: y\r\n",
        "close": b"Connection: close\r\n",
        "keep-alive": b"Connection: keep-alive, upgrade\r\n",
        "upgrade": b"Connection: upgrade\r\nUpgrade: websocket\r\n",
        "key": f"Authorization: Bearer {ADMIN_KEY}\r\n".encode(),
        "length": b"Content-Length: 5\r\n",
        "encoding": b"Transfer-Encoding: chunked\r\n",
        "host": b"Host: elsewhere\r\n",
        "expect": b"Expect: 100-continue\r\n",
        "folded": b"X: y\r\n z\r\n",
        "bare-lf": b"X: y\n",
        "no-colon": b"nothing\r\n",
        "many": b"a:b\r\n" * 2_000,
        "very-many": b"a:b\r\n" * 200_000,
        "long": b"a:" + b"b" * 1_000_000 + b"\r\n",
    }.items():
        yield Shape(f"trailer-{name}", _PIECES + b"\r\n" + chunk() + b"0\r\n" + lines + b"\r\n" + _HIDDEN_REQUEST)
    announced = _PIECES + b"Trailer: X\r\n\r\n" + chunk() + b"0\r\nX: y\r\n\r\n"
    yield Shape("trailer-announced", announced)
    yield Shape("trailer-without-end", _PIECES + b"\r\n" + chunk() + b"0\r\nX: y")


def _upgrades() -> Iterator[Shape]:
    upgrade = b"GET /health HTTP/1.1\r\n" + _HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    yield Shape("upgrade", upgrade + key + b"\r\n")
    yield Shape("upgrade-then-another", upgrade + key + b"\r\n" + _HIDDEN_REQUEST)
    yield Shape(
        "upgrade-with-a-body",
        _PLAIN + b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n" + BODY,
    )
    yield Shape("upgrade-with-chunks", _PIECES + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + chunk() + _LAST)
    yield Shape("upgrade-500-times", (upgrade + b"\r\n") * 500)
    yield Shape("http-2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 50)
    yield Shape("connect", b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + _HOST + b"\r\n" + _HIDDEN_REQUEST)
    yield Shape("expect", _PLAIN + b"Expect: 100-continue\r\n\r\n" + BODY)
    yield Shape("expect-and-nothing", _PLAIN + b"Expect: 100-continue\r\n\r\n", ends=True)
    yield Shape("expect-something-else", _PLAIN + b"Expect: a miracle\r\n\r\n" + BODY)
    yield Shape("expect-twice", _PLAIN + b"Expect: 100-continue\r\nExpect: 100-continue\r\n\r\n" + BODY)
    yield Shape("expect-then-another", _PLAIN + b"Expect: 100-continue\r\n\r\n" + _HIDDEN_REQUEST)


def _targets() -> Iterator[Shape]:
    rest = _HOST + _LENGTH + b"\r\n" + BODY
    for name, target in {
        "absolute": f"http://127.0.0.1{CHAT}",
        "elsewhere": f"http://elsewhere{CHAT}",
        "with-a-name": f"http://someone@127.0.0.1{CHAT}",
        "no-slash": CHAT[1:],
        "two-slashes": f"/{CHAT}",
        "dots": f"/v1/../admin/../{CHAT[1:]}",
        "coded-dots": f"/v1/%2e%2e{CHAT}",
        "coded-slash": CHAT.replace("/chat", "%2Fchat"),
        "nul": f"{CHAT}%00",
        "fragment": f"{CHAT}#x",
        "query": f"{CHAT}?x=y",
        "star": "*",
        "long": f"{CHAT}?{'x' * 100_000}",
        "space": "/v1/chat completions",
    }.items():
        yield Shape(f"target-{name}", f"POST {target} HTTP/1.1\r\n".encode() + rest)
    for name, line in {
        "lower-case": f"post {CHAT} HTTP/1.1",
        "unknown": f"CHAT {CHAT} HTTP/1.1",
        "version-1.2": f"POST {CHAT} HTTP/1.2",
        "version-2": f"POST {CHAT} HTTP/2.0",
        "version-0.9": f"POST {CHAT}",
        "version-absent": f"POST {CHAT} ",
        "version-words": f"POST {CHAT} ICE/1.0",
    }.items():
        yield Shape(f"line-{name}", line.encode() + b"\r\n" + rest)
    yield Shape("no-host", _START + _LENGTH + b"\r\n" + BODY)
    yield Shape("hosts", _START + _HOST + rest)
    yield Shape("other-hosts", _START + b"Host: elsewhere\r\n" + rest)
    yield Shape("bad-host", _START + b"Host: a b\r\n" + _LENGTH + b"\r\n" + BODY)
    yield Shape("empty-host", _START + b"Host:\r\n" + _LENGTH + b"\r\n" + BODY)


def _ends() -> Iterator[Shape]:
    yield Shape("half-closed", _PLAIN + b"\r\n" + BODY, ends=True)
    yield Shape("half-closed-in-the-head", _PLAIN, ends=True)
    yield Shape("half-closed-in-the-body", _PLAIN + b"\r\n" + BODY[:-5], ends=True)
    yield Shape("half-closed-in-a-chunk", _PIECES + b"\r\n" + chunk()[:-5], ends=True)
    yield Shape("half-closed-before-the-last-chunk", _PIECES + b"\r\n" + chunk(), ends=True)
    yield Shape("left-in-the-head", _PLAIN)
    yield Shape("left-in-the-body", _PLAIN + b"\r\n" + BODY[:-5])
    yield Shape("left-in-a-chunk", _PIECES + b"\r\n" + chunk()[:-5])
    yield Shape("pipelined", _request(ATTACK) * 20)
    yield Shape("pipelined-then-broken", _request(ATTACK) * 3 + b"\0")
    yield Shape("pipelined-then-left", _request(ATTACK) * 3 + _PLAIN + b"\r\n" + BODY[:-5])
    yield Shape("pipelined-after-a-refusal", _request(ATTACK).replace(b'"model"', b'"lodem"') + _request(ATTACK))
