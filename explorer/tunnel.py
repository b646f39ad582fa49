"""Carries connections to a Unix socket over to another machine, where they come from a Unix socket.

The far end lets nobody in who does not prove for each connection that he knows the secret: an engine's own key guards
only some of its routes. What is carried is not encrypted.
"""

import asyncio
import hmac
import secrets
from functools import partial
from pathlib import Path

_NONCE = 32
_PROVE_S = 10.0
_BLOCK = 1 << 16


def proof(secret: bytes, nonce: bytes) -> bytes:
    """What only those who know the secret can say about a nonce."""
    return hmac.digest(secret, nonce, "sha256")


async def open_far_end(socket: Path, secret: bytes, host: str) -> asyncio.Server:
    """Carry on to `socket` whoever comes to a free port of `host` and knows the secret."""
    return await asyncio.start_server(partial(_let_in, socket, secret), host, 0)


async def open_near_end(socket: Path, secret: bytes, far_end: tuple[str, int]) -> asyncio.Server:
    """Carry whoever comes to `socket` to the far end."""
    return await asyncio.start_unix_server(partial(_carry, secret, far_end), socket)


async def _let_in(socket: Path, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        async with asyncio.timeout(_PROVE_S):
            said = await reader.readexactly(len(proof(secret, nonce)))
        if hmac.compare_digest(said, proof(secret, nonce)):
            await _join(reader, writer, *await asyncio.open_unix_connection(socket))
    except (OSError, EOFError, TimeoutError):
        pass  # whoever came sees that it ends: the engine is gone, or he is a stranger
    finally:
        writer.close()


async def _carry(
    secret: bytes, far_end: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(_PROVE_S):
            far_reader, far_writer = await asyncio.open_connection(*far_end)
            far_writer.write(proof(secret, await far_reader.readexactly(_NONCE)))
        await _join(reader, writer, far_reader, far_writer)
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        writer.close()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Give each what the other says, until either ends."""
    await asyncio.gather(_pour(reader, other_writer), _pour(other_reader, writer))


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
