"""Sends a few copies of requests to a candidate version, whose replies reach no client and no outbox."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection

import structlog

from tuneloop.explorer.channel import ShadowReply
from tuneloop.explorer.dialects.dialect import CHAT, TEXT, split_events
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.request import Request
from tuneloop.explorer.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
from tuneloop.shared.errors import EngineError
from tuneloop.shared.ledger.versions.drift import LONGEST

log = structlog.get_logger()

#: Shadow requests in flight at once, per process.
_MAX_IN_FLIGHT = 8

_DATA = b"data: "


class Shadow:
    def __init__(
        self,
        fleet: Fleet,
        *,
        refusals: Collection[re.Pattern[str]],
        report: Callable[[ShadowReply], Awaitable[None]],
        metrics: Metrics,
        timeout_s: float,
    ) -> None:
        """`refusals` are patterns of replies that refuse; `report` is called with each measured reply."""
        self._fleet = fleet
        self._refusals = refusals
        self._report = report
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._in_flight = 0
        self._queue: asyncio.Queue[tuple[Engine, Request]] = asyncio.Queue()

    def offer(self, request: Request) -> None:
        split = self._fleet.split
        if split is None or not split.shadow_share or request.dialect.upstream_path not in {CHAT, TEXT}:
            return
        if not split.shadows(request.key):
            return
        engine = self._fleet.acquire_for_shadow() if self._in_flight < _MAX_IN_FLIGHT else None
        if engine is None:
            self._metrics.copies.labels("dropped").inc()
            return
        self._in_flight += 1
        self._queue.put_nowait((engine, request))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._send(*await self._queue.get()))

    async def _send(self, engine: Engine, request: Request) -> None:
        version, loads, started = engine.version, engine.loads, time.monotonic()
        result = ShadowReply(version, failed=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                transcript = await _shadow_reply(engine, request)
            if transcript is None:
                return
            if transcript.complete:
                seconds = time.monotonic() - started
                choices = transcript.choices.values()
                texts = ["".join(each.text)[:LONGEST] for each in choices]
                refused = any(pattern.search(text) for pattern in self._refusals for text in texts)
                tokens = sum(len(each.completion_ids) for each in choices)
                result = ShadowReply(version, failed=False, refused=refused, seconds=seconds, tokens=tokens)
        except _CopyFailed as error:
            if not await self._is_answered_elsewhere(engine, request):
                return  # it is the request's own fault, or nobody knows whose
            log.info("copy_failed", engine=engine.number, version=version, reason=str(error))
        except (EngineError, TimeoutError) as error:
            log.info("copy_failed", engine=engine.number, version=version, reason=str(error) or "no answer in time")
        finally:
            self._in_flight -= 1
            self._fleet.release(engine)
        self._metrics.copies.labels("failed" if result.failed else "answered").inc()
        if engine.loads == loads:
            await self._report(result)

    async def _is_answered_elsewhere(self, engine: Engine, request: Request) -> bool:
        other = self._fleet.acquire_another(engine)
        if other is None:
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _shadow_reply(other, request) is not None
        except (EngineError, TimeoutError):
            return False
        finally:
            self._fleet.release(other)


class _CopyFailed(EngineError):
    """The engine answered a copy with an error of its own, which the request may have caused."""


async def _shadow_reply(engine: Engine, request: Request) -> Transcript | None:
    """The reply to a shadow request; None if the engine refuses it."""
    path, headers = request.dialect.upstream_path, request.engine_headers()
    reply = await engine.http.request("POST", path, request.upstream_body, headers)
    try:
        if reply.status >= 500:
            raise _CopyFailed(f"the engine answered {reply.status}")
        if reply.status != 200:
            return None
        kind = ChatTranscript if request.dialect.upstream_path == CHAT else TextTranscript
        transcript = kind(request.msg_id, RequestedFields(logprobs=True, token_ids=True))
        await _read_reply(transcript, reply, streamed=request.stream)
    finally:
        reply.close()
    return transcript


async def _read_reply(transcript: Transcript, reply: EngineReply, *, streamed: bool) -> None:
    if not streamed:
        transcript.feed(await reply.read())
        return
    buffer = bytearray()
    async for block in reply.blocks():
        for event in split_events(buffer, block):
            if event.startswith(_DATA + b"{"):
                transcript.feed(event.removeprefix(_DATA))
