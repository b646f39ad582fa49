"""The engines, and which of them answers a request.

The decisions are synchronous, so no lock is needed: nothing else runs between looking and taking.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from enum import StrEnum

import aiohttp

from explorer.vllm_api import Control
from shared.errors import RequestRefused


class EngineState(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"
    READY = "ready"
    RELOADING = "reloading"
    DOWN = "down"


class Engine:
    """One vLLM server as the explorer sees it: where it answers, what it serves, how much it has in flight.

    `loads` counts how often its weights changed, so that a reply can tell whether they did while it was sampled.
    """

    def __init__(self, number: int, session: aiohttp.ClientSession, control: Control) -> None:
        self.number = number
        self.session = session
        self.control = control
        self.state = EngineState.STARTING
        self.version = 0
        self.in_flight = 0
        self.loads = 0
        self.idle = asyncio.Event()
        self.idle.set()


class Fleet:
    """All engines. Requests wait while none is ready, for at most `patience_s`."""

    def __init__(self, engines: Iterable[Engine], *, patience_s: float) -> None:
        self.engines = list(engines)
        self._patience_s = patience_s
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: some engine is ready, or will be in a moment."""
        return any(engine.state in {EngineState.READY, EngineState.RELOADING} for engine in self.engines)

    async def set(self, engine: Engine, state: EngineState) -> None:
        """Change an engine's state and wake whoever waits for it."""
        engine.state = state
        async with self._changed:
            self._changed.notify_all()

    async def until_down(self, engine: Engine) -> None:
        """Wait until somebody marks the engine down."""
        async with self._changed:
            await self._changed.wait_for(lambda: engine.state is EngineState.DOWN)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """The ready engine with the least in flight, counted as busy until the block ends."""
        engine = await self._wait_for_one()
        engine.in_flight += 1
        engine.idle.clear()
        try:
            yield engine
        finally:
            engine.in_flight -= 1
            if not engine.in_flight:
                engine.idle.set()

    async def _wait_for_one(self) -> Engine:
        try:
            async with asyncio.timeout(self._patience_s), self._changed:
                while (engine := least_busy(self.engines)) is None:
                    if not self.ready:
                        break
                    await self._changed.wait()
        except TimeoutError:
            engine = None
        if engine is None:
            raise RequestRefused("no engine is ready", status=503, code="engine_unavailable", retry_after_s=2.0)
        return engine


def least_busy(engines: Iterable[Engine]) -> Engine | None:
    """The ready engine with the least in flight, if any."""
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    return min(ready, key=lambda engine: engine.in_flight, default=None)
