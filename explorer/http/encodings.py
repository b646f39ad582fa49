"""Decodes request bodies that `Content-Encoding` says are compressed, piece by piece: no bomb is unpacked whole."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import brotli
import zstandard

from tuneloop.shared.errors import RequestRefused

Receive = Callable[[], Awaitable[Any]]

#: Bytes that are decoded at once. Four bytes of zstd may be a block of 128 KiB: these are at most 16 MiB.
_SLICE = 512

#: Bytes after which other requests have their turn.
_PIECE = 64 << 10

#: What RFC 9659 allows a sender to have a receiver remember.
_WINDOW = 8 << 20

_GZIP, _ZLIB, _RAW_DEFLATE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS


class _Brotli:
    """brotli's decoder behind the methods of zlib's: a few bytes may be gigabytes, so it stops at each piece."""

    unused_data = b""

    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._decoder.is_finished())

    @property
    def unconsumed(self) -> bool:
        """Whether more comes of what was given."""
        return not self._decoder.can_accept_more_data()

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._decoder.process(data, output_buffer_limit=_PIECE))


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "gzip": lambda first: zlib.decompressobj(_GZIP),
    "x-gzip": lambda first: zlib.decompressobj(_GZIP),
    # Some clients send deflate without the header of zlib, whose first byte ends in 8.
    "deflate": lambda first: zlib.decompressobj(_ZLIB if first[0] & 15 == 8 else _RAW_DEFLATE),
    "br": lambda first: _Brotli(),
    "zstd": lambda first: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(),
}

#: For the header of a refusal, as RFC 9110 asks.
ACCEPTED = "gzip, deflate, br, zstd"


def decode_body(receive: Receive, values: Iterable[bytes]) -> Receive:
    """ASGI's `receive` of a body without its `Content-Encoding`. It raises RequestRefused, and only where a body is."""
    names = str(b",".join(values), "latin-1").lower().replace(" ", "").split(",")
    named = [name for name in names if name not in {"", "identity"}]
    if not named:
        return receive
    decode, messages = _Body(", ".join(named)).messages, iter(list[Any]())

    async def receive_decoded() -> Any:
        nonlocal messages
        while (message := next(messages, None)) is None:
            message = await receive()
            if message["type"] != "http.request":
                return message
            messages = decode(message)
        await asyncio.sleep(0)  # else a whole body might be decoded without a turn for others
        return message

    return receive_decoded


class _Body:
    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._decoder: Any = None

    def messages(self, message: Any) -> Iterator[Any]:
        """The messages for one of a compressed body. Raises RequestRefused."""
        pieces, size = list[bytes](), 0
        data = message.get("body", b"")
        for begin in range(0, len(data), _SLICE):
            for piece in self._decode(data[begin : begin + _SLICE]):
                pieces.append(piece)
                size += len(piece)
                if size >= _PIECE:
                    yield {"type": "http.request", "body": b"".join(pieces), "more_body": True}
                    pieces, size = [], 0
        more = message.get("more_body", False)
        if not (more or self._decoder is None or self._decoder.eof):
            raise self._refusal("it ends too early")
        yield {"type": "http.request", "body": b"".join(pieces), "more_body": more}

    def _decode(self, data: bytes) -> Iterator[bytes]:
        if self._encoding not in _DECODERS:
            message = f"bodies of Content-Encoding {self._encoding[:100]!r} are not accepted: send {ACCEPTED} or none"
            raise RequestRefused(message, status=415, code="unsupported_content_encoding")
        try:
            while data:
                if self._decoder is None or self._decoder.eof:  # of gzip and zstd several may follow each other
                    self._decoder = _DECODERS[self._encoding](data)
                yield self._decoder.decompress(data)
                while isinstance(self._decoder, _Brotli) and self._decoder.unconsumed:
                    yield self._decoder.decompress(b"")
                data = self._decoder.unused_data if self._decoder.eof else b""
        except (zlib.error, zstandard.ZstdError, brotli.error) as error:
            raise self._refusal(str(error)) from None

    def _refusal(self, reason: str) -> RequestRefused:
        message = f"the body is not what Content-Encoding says, {self._encoding}: {reason}"
        return RequestRefused(message, code="invalid_content_encoding")
