"""Sends copies of requests to a version that is being tried: nobody gets its replies, and nothing of them is kept.

Users come first: what would make more than a few at once is not copied.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection

import structlog

from tuneloop.explorer.capture.control_client import ShadowReply
from tuneloop.explorer.capture.transcript import ChatTranscript, RequestedFields, TextTranscript, Transcript
from tuneloop.explorer.dialects.dialect import CHAT, TEXT, events
from tuneloop.explorer.engines.client import EngineReply
from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.request import Request
from tuneloop.shared.errors import EngineError
from tuneloop.shared.ledger.versions.drift import LONGEST

log = structlog.get_logger()

#: At once, of each process.
_MOST = 8

_DATA = b"data: "


class Shadow:
    """The copies under way, each of which keeps its engine busy."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        refusals: Collection[re.Pattern[str]],
        told: Callable[[ShadowReply], Awaitable[None]],
        metrics: Metrics,
        timeout_s: float,
    ) -> None:
        """`refusals` are found in replies that refuse; `told` hears what became of each copy."""
        self._fleet = fleet
        self._refusals = refusals
        self._told = told
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._under_way = 0
        self._begun: asyncio.Queue[tuple[Engine, Request]] = asyncio.Queue()

    def offer(self, call: Request) -> None:
        """Copy a request, if it is one of those that are copied."""
        split = self._fleet.split
        if split is None or not split.copies or call.dialect.upstream_path not in {CHAT, TEXT}:
            return
        if not split.copied(call.key):
            return
        engine = self._fleet.take_for_copies() if self._under_way < _MOST else None
        if engine is None:
            self._metrics.copies.labels("dropped").inc()
            return
        self._under_way += 1
        self._begun.put_nowait((engine, call))

    async def run(self) -> None:
        """Send what is offered, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._copy(*await self._begun.get()))

    async def _copy(self, engine: Engine, call: Request) -> None:
        version, loads, started = engine.version, engine.loads, time.monotonic()
        copied = ShadowReply(version, failed=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                transcript = await _heard(engine, call)
            if transcript is None:
                return
            if transcript.complete:
                copied = self._whole(version, time.monotonic() - started, transcript)
        except (EngineError, TimeoutError) as error:
            log.info("copy_failed", engine=engine.number, version=version, reason=str(error) or "no answer in time")
        finally:
            self._under_way -= 1
            self._fleet.give_back(engine)
        self._metrics.copies.labels("failed" if copied.failed else "answered").inc()
        if engine.loads == loads:
            await self._told(copied)

    def _whole(self, version: int, seconds: float, transcript: Transcript) -> ShadowReply:
        choices = transcript.choices.values()
        texts = ["".join(each.text)[:LONGEST] for each in choices]
        refused = any(pattern.search(text) for pattern in self._refusals for text in texts)
        tokens = sum(len(each.completion_ids) for each in choices)
        return ShadowReply(version, failed=False, refused=refused, seconds=seconds, tokens=tokens)


async def _heard(engine: Engine, call: Request) -> Transcript | None:
    """The reply to a copy; None where the engine does not take the request."""
    name = call.msg_id.removeprefix(call.dialect.prefix)
    headers = {"X-Request-Id": name, "Content-Type": "application/json"}
    reply = await engine.http.ask("POST", call.dialect.upstream_path, call.upstream, headers)
    try:
        if reply.status >= 500:
            raise EngineError(f"the engine answered {reply.status}")
        if reply.status != 200:
            return None
        kind = ChatTranscript if call.dialect.upstream_path == CHAT else TextTranscript
        transcript = kind(call.msg_id, RequestedFields(logprobs=True, token_ids=True))
        await _hear(transcript, reply, streamed=call.stream)
    finally:
        reply.close()
    return transcript


async def _hear(transcript: Transcript, reply: EngineReply, *, streamed: bool) -> None:
    if not streamed:
        transcript.feed(await reply.read())
        return
    rest = bytearray()
    async for block in reply.blocks():
        for event in events(rest, block):
            if event.startswith(_DATA + b"{"):
                transcript.feed(event.removeprefix(_DATA))
