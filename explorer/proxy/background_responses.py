"""Waits for replies that an engine goes on with after their client got an answer, and keeps them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

import structlog

from tuneloop.explorer.dialects.dialect import RESPONSES
from tuneloop.explorer.dialects.responses_native import NativeResponseTranscript
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.shared.errors import EngineError, SpoolFull

if TYPE_CHECKING:
    from tuneloop.explorer.proxy.in_flight import ReplyInFlight

log = structlog.get_logger()

#: Between two looks at a reply: at first, and at most.
_SOON_S, _LATER_S = 0.05, 1.0

#: So many looks in a row may fail.
_FAILURES = 3


class BackgroundResponses:
    """The replies under way. Each keeps its engine, and its place among the requests that are answered at once."""

    def __init__(
        self,
        *,
        keep: Callable[["ReplyInFlight"], Awaitable[None]],
        leave: Callable[["ReplyInFlight"], None],
        timeout_s: float,
    ) -> None:
        """`keep` brings one to disk when it is over, `leave` gives back what it held."""
        self._keep = keep
        self._leave = leave
        self._timeout_s = timeout_s
        self._begun: asyncio.Queue[ReplyInFlight] = asyncio.Queue()

    def follow(self, spoken: "ReplyInFlight") -> None:
        """Wait for one more, which holds its engine and its place until it is over."""
        self._begun.put_nowait(spoken)

    async def run(self) -> None:
        """Wait for those that are followed, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._until_kept(await self._begun.get()))

    async def _until_kept(self, spoken: "ReplyInFlight") -> None:
        msg_id, transcript = spoken.call.msg_id, spoken.call.teller.transcript
        assert isinstance(transcript, NativeResponseTranscript)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await _until_over(spoken.engine, msg_id, transcript)
            except TimeoutError:
                await _cancelled(spoken.engine, msg_id)
                transcript.lose()
            except EngineError as error:
                log.warning("background_response_lost", msg_id=msg_id, reason=str(error))
                transcript.lose()
            await self._keep(spoken)
        except SpoolFull as error:
            log.error("reply_lost", msg_id=msg_id, reason=str(error))
        finally:
            self._leave(spoken)


async def _until_over(engine: Engine, msg_id: str, transcript: NativeResponseTranscript) -> None:
    pause_s, failures = _SOON_S, 0
    while not transcript.choices:
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LATER_S)
        try:
            transcript.feed(await _looked_at(engine, msg_id))
            failures = 0
        except EngineError:
            failures += 1
            if failures >= _FAILURES:
                raise


async def _looked_at(engine: Engine, msg_id: str) -> bytes:
    reply = await engine.http.ask("GET", path_of(msg_id))
    try:
        told = await reply.read()
    finally:
        reply.close()
    if reply.status != 200:
        raise EngineError(f"the engine answered {reply.status}")
    return told


async def _cancelled(engine: Engine, msg_id: str) -> None:
    """Tell the engine to stop."""
    try:
        async with asyncio.timeout(_LATER_S):
            reply = await engine.http.ask("POST", f"{path_of(msg_id)}/cancel")
            reply.close()
    except (EngineError, TimeoutError) as error:
        log.warning("background_response_not_cancelled", msg_id=msg_id, reason=str(error))


def path_of(msg_id: str) -> str:
    """Where an engine is asked for a response."""
    return f"{RESPONSES}/{quote(msg_id, safe='')}"
