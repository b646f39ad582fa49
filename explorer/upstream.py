"""The way to an engine: its connections, what goes wrong on them, and the events of a streamed reply."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp

from shared.errors import EngineError, RequestRefused

#: Shorter than the five seconds after which uvicorn, and so vLLM, closes an idle connection.
_KEEP_S = 4.0

_LONGEST_EVENT = 16 << 20


def open_session(*, url: str | None, socket: str | None, key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session to one engine, at a URL or on a Unix socket; as many connections as there are requests."""
    connector = (
        aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=_KEEP_S)
        if socket
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S)
    )
    return aiohttp.ClientSession(
        url or "http://engine",
        connector=connector,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
        read_bufsize=1 << 18,
    )


@contextmanager
def reaching_an_engine() -> Iterator[None]:
    """Raise what goes wrong on the way as our own errors."""
    try:
        yield
    except TimeoutError:
        raise RequestRefused("the engine did not answer in time", status=504, code="engine_timeout") from None
    except aiohttp.ClientError as error:
        raise EngineError("the engine cannot be reached") from error


async def events(body: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = bytearray()
    async for block in body.iter_any():
        rest += block
        while (end := rest.find(b"\n\n")) >= 0:
            event = bytes(rest[:end])
            del rest[: end + 2]
            if event.startswith(b"data:"):
                yield event[5:].strip()
        if len(rest) > _LONGEST_EVENT:
            raise aiohttp.ClientPayloadError(f"an event of more than {_LONGEST_EVENT} bytes")
