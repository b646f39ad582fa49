"""An explorer that has answered a while holds no more than when it began."""

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.doubles.engine import recorded
from tests.explorer.running import RunningExplorer, explorer_running, settings_for
from tests.explorer.wire import BODY, Wire, http_request, streamed

REQUESTS, CONNECTIONS = 3996, 12
WHOLE, STREAM = recorded("whole_captured.json"), recorded("stream_nousage_captured.sse")


class Quick(asyncio.Protocol):
    """An engine that costs next to nothing: it says what was recorded, as one piece."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            name = head.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0]
            reply = (STREAM if b'"stream": true' in body else WHOLE).replace(b"-recorded", b"-" + name)
            if b" /v1/completions " in head:  # sent before the engine is attached
                reply = b'{"choices": [{"logprobs": {"token_logprobs": [0.0]}}]}'
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply))


@contextmanager
def quick_engine() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Quick, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def ask(explorer: RunningExplorer, requests: int) -> None:
    def one() -> None:
        with Wire(explorer.url) as wire:
            for number in range(requests // CONNECTIONS):
                wire.send(http_request(streamed() if number % 2 else BODY))
                assert wire.response().status == 200

    asking = [threading.Thread(target=one) for _ in range(CONNECTIONS)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    explorer.until_flushed()


def holds() -> tuple[int, int]:
    """Objects that the collector knows, and megabytes of memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_thousands_of_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with quick_engine() as url, explorer_running(settings_for(tmp_path, [url])) as explorer:
        ask(explorer, 1000)
        before = holds()
        ask(explorer, REQUESTS)
        after = holds()
        (answered,) = explorer.rows("SELECT count(*) FROM experiences")
    assert answered[0] == 1000 // CONNECTIONS * CONNECTIONS + REQUESTS
    assert after[0] - before[0] < REQUESTS // 2, "objects"
    assert after[1] - before[1] < 16, "megabytes"
