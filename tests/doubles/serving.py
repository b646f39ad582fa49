"""Serves an ASGI app under a real uvicorn, in a thread of its own, on a free port."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tuneloop.explorer.edge import Http11


class Resettable(Http11):
    """Lets an app get at its connection, which real servers lose and ASGI has no word for."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"transport": self.transport}


def reset(scope: Any) -> None:
    """End the connection of a request as a crash does: with RST."""
    transport: asyncio.Transport = scope["extensions"]["transport"]
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Prompt(uvicorn.Server):
    """Looks more often than ten times a second whether it shall end."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)


@contextmanager
def serving(app: Any, *, drain_s: int = 5) -> Iterator[str]:
    """The URL at which `app` is served until the block ends; its lifespan runs."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            log_level="critical",
            http=Resettable,
            ws="none",
            timeout_graceful_shutdown=drain_s,
            timeout_keep_alive=75,  # as a worker's: a client that stood still for 5 s could ask on what is just closed
        )
        server = _Prompt(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                thread.join(0.005)
            assert server.started, "the app did not start"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
