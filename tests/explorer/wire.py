"""HTTP without any HTTP library: what a test sends and gets, byte by byte."""

import json
import socket
import struct
import time
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from tests.doubles.engine import CHAT
from tests.explorer.running import HELLO

BODY = json.dumps(HELLO).encode()


class WireResponse(NamedTuple):
    """One answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Wire:
    """One connection to a server, without any HTTP library."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
        self._file: BinaryIO = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self, *, head: bool = False) -> WireResponse:
        """The next answer."""
        status = int(self._file.readline().split()[1])
        headers = {}
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            assert name not in headers, "twice the same header"
            headers[name] = value.strip()
        return WireResponse(status, headers, b"" if head or status == 100 else self._body(headers))

    def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return self._file.read(int(headers["content-length"]))
        if "transfer-encoding" not in headers:
            return self._file.read()
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            assert self._file.read(2) == b"\r\n"
        assert self._file.readline() == b"\r\n"
        return body

    def line(self) -> bytes:
        """The next piece of an answer in pieces, up to the end of its first line."""
        self._file.readline()
        return self._file.readline()

    def rest(self) -> bytes:
        """What comes until the server closes."""
        return self._file.read()

    def reset(self) -> None:
        """End the connection as a crash does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def http_request(
    body: bytes = BODY, *headers: str, path: str = CHAT, version: str = "1.1", method: str = "POST"
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", f"content-length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"


def streamed(**but: Any) -> bytes:
    return json.dumps(HELLO | {"stream": True} | but).encode()


def is_closed(wire: Wire, endless: bytes) -> bool:
    """Whether the server closes before too long, however much is sent to it."""
    try:
        for _ in range(1000):
            wire.send(endless)
            time.sleep(0.003)
    except OSError:
        return True
    return False
