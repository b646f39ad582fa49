"""The engines, and which of them answers a request.

The decisions are synchronous, so no lock is needed: nothing else runs between looking and taking.
"""

import asyncio
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from explorer.engine_http import EngineHttp
from explorer.vllm_api import Control
from shared.errors import RequestRefused


class EngineState(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"
    READY = "ready"
    RELOADING = "reloading"
    DOWN = "down"


class Engine:
    """One vLLM server as those see it who ask it: where it answers, what it serves, how much they have in flight there.

    `loads` counts how often its weights changed, so that a reply can tell whether they did while it was sampled.
    """

    def __init__(self, number: int, http: EngineHttp, control: Control | None = None) -> None:
        """`control` is for those who run it and swap its weights."""
        self.number = number
        self.http = http
        self._control = control
        self.state = EngineState.STARTING
        self.version = 0
        self.in_flight = 0
        self.loads = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def control(self) -> Control:
        """Its weight routes."""
        assert self._control is not None
        return self._control


class Known(Protocol):
    """What there is to know of an engine."""

    @property
    def number(self) -> int:
        """Which one."""

    @property
    def state(self) -> EngineState:
        """What it is doing."""

    @property
    def version(self) -> int:
        """What it serves."""

    @property
    def loads(self) -> int:
        """How often its weights changed."""


class Audience(Protocol):
    """Others who send requests to the engines: they must know of a change before it is gone on from."""

    async def tell(self, engine: Engine) -> None:
        """Return when all know the engine as it is now."""

    async def until_idle(self, engine: Engine) -> None:
        """Return when none has a request in flight there."""


class Fleet:
    """All engines. Requests wait while none is ready, for at most `patience_s`."""

    def __init__(self, engines: Iterable[Engine], *, patience_s: float, audience: Audience | None = None) -> None:
        self.engines = list(engines)
        self._patience_s = patience_s
        self._audience = audience
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: some engine is ready, or will be in a moment."""
        return any(engine.state in {EngineState.READY, EngineState.RELOADING} for engine in self.engines)

    async def set(self, engine: Engine, state: EngineState) -> None:
        """Change an engine's state and wake whoever waits for it."""
        engine.state = state
        await self._tell(engine)

    async def loading(self, engine: Engine) -> None:
        """Say that an engine's weights begin to change: what is in flight there is written by two versions."""
        engine.loads += 1
        await self._tell(engine)

    async def loaded(self, engine: Engine, version: int) -> None:
        """Say which version an engine has."""
        engine.version = version
        await self._tell(engine)

    async def learn(self, known: Sequence[Known]) -> None:
        """Take over what is known elsewhere of engines."""
        for each in known:
            engine = self.engines[each.number]
            engine.state, engine.version, engine.loads = each.state, each.version, each.loads
        async with self._changed:
            self._changed.notify_all()

    async def _tell(self, engine: Engine) -> None:
        if self._audience is not None:
            await self._audience.tell(engine)
        async with self._changed:
            self._changed.notify_all()

    async def until_idle(self, engine: Engine) -> None:
        """Wait until nobody has a request in flight at the engine."""
        await engine.idle.wait()
        if self._audience is not None:
            await self._audience.until_idle(engine)

    async def until_down(self, engine: Engine) -> None:
        """Wait until somebody marks the engine down."""
        async with self._changed:
            await self._changed.wait_for(lambda: engine.state is EngineState.DOWN)

    async def take(self) -> Engine:
        """The ready engine with the least in flight, counted as busy until it is given back."""
        engine = least_busy(self.engines) or await self._wait_for_one()
        return self._taken(engine)

    def take_another(self, than: Engine) -> Engine | None:
        """The same, but not this one; None if no other is ready."""
        engine = least_busy(each for each in self.engines if each is not than)
        return self._taken(engine) if engine else None

    def give_back(self, engine: Engine) -> None:
        """Say that a request which took the engine is done with it."""
        engine.in_flight -= 1
        if not engine.in_flight:
            engine.idle.set()

    def _taken(self, engine: Engine) -> Engine:
        engine.in_flight += 1
        engine.idle.clear()
        return engine

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
