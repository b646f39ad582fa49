"""Background responses: waits for replies that an engine finishes after their client got an answer; records them."""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import structlog

from tuneloop.explorer.dialects.dialect import RESPONSES
from tuneloop.explorer.dialects.responses_native import NativeResponseTranscript
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.proxy.request import ReplyInFlight
from tuneloop.shared.errors import EngineError, SpoolFull

log = structlog.get_logger()

#: Seconds between two polls of a reply: at first, and at most.
_FIRST_POLL_S, _MAX_POLL_S = 0.05, 1.0

#: So many polls in a row may fail.
_FAILURES = 3


class BackgroundResponses:
    """The background replies in flight. Each holds its engine, and counts as a request in flight."""

    def __init__(
        self,
        *,
        count: Callable[[ReplyInFlight], None],
        record: Callable[[ReplyInFlight], Awaitable[None]],
        release: Callable[[ReplyInFlight], None],
        timeout_s: float,
    ) -> None:
        """`count` counts how a reply ended, `record` writes it to disk, `release` releases what it held."""
        self._count = count
        self._record = record
        self._release = release
        self._timeout_s = timeout_s
        self._queue: asyncio.Queue[ReplyInFlight] = asyncio.Queue()

    def follow(self, in_flight: ReplyInFlight) -> None:
        """Add a reply to wait for; it holds its engine, and counts as one of its key's, until it is finished."""
        in_flight.request.meter.keep()
        self._queue.put_nowait(in_flight)

    async def run(self) -> None:
        """Wait for the followed replies, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._record_at_end(await self._queue.get()))

    async def _record_at_end(self, in_flight: ReplyInFlight) -> None:
        msg_id, transcript = in_flight.request.msg_id, in_flight.request.writer.transcript
        assert isinstance(transcript, NativeResponseTranscript)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await _poll_until_finished(in_flight.engine, msg_id, transcript)
            except TimeoutError:
                await _cancel(in_flight.engine, msg_id)
                transcript.mark_broken()
            except EngineError as error:
                log.warning("background_response_lost", msg_id=msg_id, reason=str(error))
                transcript.mark_broken()
            self._count(in_flight)
            await self._record(in_flight)
        except SpoolFull as error:
            log.error("reply_lost", msg_id=msg_id, reason=str(error))
        finally:
            in_flight.request.meter.release()
            self._release(in_flight)


async def _poll_until_finished(engine: Engine, msg_id: str, transcript: NativeResponseTranscript) -> None:
    pause_s, failures = _FIRST_POLL_S, 0
    while not transcript.choices:
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)
        try:
            transcript.feed(await _fetch(engine, msg_id))
            failures = 0
        except EngineError:
            failures += 1
            if failures >= _FAILURES:
                raise


async def _fetch(engine: Engine, msg_id: str) -> bytes:
    reply = await engine.http.request("GET", response_path(msg_id))
    try:
        body = await reply.read()
    finally:
        reply.close()
    if reply.status != 200:
        raise EngineError(f"the engine answered {reply.status}")
    return body


async def _cancel(engine: Engine, msg_id: str) -> None:
    """Make the engine stop."""
    try:
        async with asyncio.timeout(_MAX_POLL_S):
            reply = await engine.http.request("POST", f"{response_path(msg_id)}/cancel")
            reply.close()
    except (EngineError, TimeoutError) as error:
        log.warning("background_response_not_cancelled", msg_id=msg_id, reason=str(error))


def response_path(msg_id: str) -> str:
    """The path of a response on an engine."""
    return f"{RESPONSES}/{quote(msg_id, safe='')}"
