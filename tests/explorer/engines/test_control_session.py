"""The session of an engine's weight routes: where it goes, how long it waits, and what comes of what goes wrong."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tuneloop.explorer.engines import vllm
from tuneloop.explorer.engines.vllm import EngineControl, open_session
from tuneloop.explorer.proxy.grammars import give_first_grammar
from tuneloop.shared.errors import EngineError


@dataclass
class Listening:
    """Takes any request: its head and body, and on which connection it came.

    `silent`: it never answers; `ends`: a connection ends with its answer.
    """

    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    silent: bool = False
    ends: bool = False
    received: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: int = 0
    tasks: set["asyncio.Task[None] | None"] = field(default_factory=set)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        with contextlib.closing(writer.transport), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                reply = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(reply[0].split(b":")[1]) if reply else 0)
                self.received.append((head, body))
                if self.silent:
                    await reader.read()
                writer.write(self.answer)
                if self.ends:
                    writer.close()


@asynccontextmanager
async def controlling(
    folder: Path, listening: Listening, *, key: str | None = None, by_url: str | None = None
) -> AsyncIterator[EngineControl]:
    """The control of what listens on a socket of the file system, or at `by_url` followed by a port."""
    path = str(folder / "socket")
    if by_url is None:
        server = await asyncio.start_unix_server(listening, path)
    else:
        server = await asyncio.start_server(listening, "127.0.0.1", 0)
    url = f"{by_url}:{server.sockets[0].getsockname()[1]}" if by_url else None
    async with server, open_session(url=url, socket=None if by_url else path, key=key) as session:
        yield EngineControl(session, model_name="m")
        await session.aclose()
        await asyncio.gather(*filter(None, listening.tasks))


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
async def test_an_engine_is_given_a_grammar_if_these_are_rebuilt(tmp_path: Path, status: bytes) -> None:
    """The library that enforces its first one enforces all."""
    listening = Listening(answer=b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)
    async with controlling(tmp_path, listening) as control:
        await give_first_grammar(control)
        assert listening.received == []
        control.rebuilds_grammars = True
        await give_first_grammar(control)  # one that enforces none is used all the same
    [(_, body)] = listening.received
    assert json.loads(body)["structured_outputs"] == {"regex": "a"}


@pytest.mark.parametrize("by_url", [None, "http://127.0.0.1"])
async def test_it_asks_no_proxy_of_the_environment(
    tmp_path: Path, by_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with controlling(tmp_path, Listening(), by_url=by_url) as control:
        assert await control.healthy()


async def test_an_engine_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_TIMEOUT_S", 0.1)
    async with controlling(tmp_path, Listening(silent=True)) as control:
        assert not await control.healthy(timeout_s=0.1)
        with pytest.raises(EngineError, match=r"^/resume: TimeoutError$"):
            await control.resume()
