"""The engines, and which of them answers a request.

The decisions are synchronous, so no lock is needed: nothing else runs between looking and taking.
"""

import asyncio
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.explorer.engines.affinity import Affinity, overloaded
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.version_routing import TrafficSplit, VersionPin
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared.errors import RequestRefused

#: By what the engine of a request is chosen: whose it is, or which version must answer it.
RoutingKey = str | VersionPin


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

    def __init__(self, number: int, http: EngineHttp, control: EngineControl | None = None) -> None:
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
    def control(self) -> EngineControl:
        """Its weight routes."""
        assert self._control is not None
        return self._control

    @property
    def renaming(self) -> ModelRenaming | None:
        """The adapter that it serves, if that is what versions are."""
        return self.http.renaming

    def begin_load(self) -> None:
        """Weights begin to change under what is in flight; adapters do not."""
        if self._control is None or self._control.in_place:
            self.loads += 1

    def end_load(self, version: int) -> None:
        """From now on it answers with this version."""
        self.version = version
        if self._control is not None:
            self.http.renaming = self._control.renaming


class EngineStatus(Protocol):
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

    @property
    def renaming(self) -> ModelRenaming | None:
        """The adapter that it serves."""


class FleetReplicas(Protocol):
    """Others who send requests to the engines: they must know of a change before it is gone on from."""

    async def tell(self, engine: Engine) -> None:
        """Return when all know the engine as it is now."""

    async def divide(self, split: TrafficSplit | None) -> None:
        """Return when all divide their requests so."""

    async def until_idle(self, engine: Engine) -> None:
        """Return when none has a request in flight there."""


class Fleet:
    """All engines. Requests wait while none is ready, for at most `patience_s`.

    With a `split`, engines that have the version which is being tried get its share of the requests and no others.
    """

    def __init__(self, engines: Iterable[Engine], *, patience_s: float, audience: FleetReplicas | None = None) -> None:
        self.engines = list(engines)
        self.split: TrafficSplit | None = None
        self._patience_s = patience_s
        self._audience = audience
        self._affinity = Affinity()
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: some engine is ready, or will be in a moment."""
        return self._about_to_be(self.engines)

    @property
    def served(self) -> list[int]:
        """The versions that answer now."""
        return sorted({each.version for each in self.engines if each.state is EngineState.READY})

    @staticmethod
    def _about_to_be(engines: Iterable[Engine]) -> bool:
        return any(engine.state in {EngineState.READY, EngineState.RELOADING} for engine in engines)

    async def set(self, engine: Engine, state: EngineState) -> None:
        """Change an engine's state and wake whoever waits for it."""
        engine.state = state
        await self._tell(engine)

    async def loading(self, engine: Engine) -> None:
        """Say that an engine's weights begin to change: what is in flight there is written by two versions."""
        engine.begin_load()
        await self._tell(engine)

    async def loaded(self, engine: Engine, version: int) -> None:
        """Say which version an engine has."""
        engine.end_load(version)
        await self._tell(engine)

    async def divide(self, split: TrafficSplit | None) -> None:
        """Divide the requests between the champion and a version that is being tried; None: there is none."""
        self.split = split
        if self._audience is not None:
            await self._audience.divide(split)
        async with self._changed:
            self._changed.notify_all()

    async def learn(self, known: Sequence[EngineStatus]) -> None:
        """Take over what is known elsewhere of engines."""
        for each in known:
            engine = self.engines[each.number]
            engine.state, engine.version, engine.loads = each.state, each.version, each.loads
            engine.http.renaming = each.renaming
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

    async def take(self, key: RoutingKey | None = None, beginnings: Sequence[int] = ()) -> Engine:
        """The engine that answers a request of a key, counted as busy until it is given back.

        Without a key it is one of the champion's. `beginnings` are those of what it is asked
        (`explorer/engines/affinity.py`).
        """
        engine = self._chosen(self.engines, key, beginnings)
        return self._taken(engine or await self._wait_for_one(self.engines, key, beginnings), beginnings)

    def take_another(
        self, than: Engine, key: RoutingKey | None = None, beginnings: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but not this one; None if no other may."""
        engine = self._chosen(self._others(than), key, beginnings)
        return self._taken(engine, beginnings) if engine else None

    async def wait_for_another(
        self, than: Engine, key: RoutingKey | None = None, beginnings: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but one that is being reloaded is waited for; None if no other may, nor will in a moment."""
        others = self._others(than)
        engine = self._chosen(others, key, beginnings)
        if engine is None and self._about_to_be(able(others, key)):
            engine = await self._wait_for_one(others, key, beginnings)
        return self._taken(engine, beginnings) if engine else None

    def _others(self, than: Engine) -> list[Engine]:
        return [each for each in self.engines if each is not than]

    def _chosen(self, engines: Sequence[Engine], key: RoutingKey | None, beginnings: Sequence[int]) -> Engine | None:
        knowing = self._affinity.knowing(beginnings, engines) if beginnings else ()
        return chosen(engines, self.split, key, knowing)

    def take_for_copies(self) -> Engine | None:
        """A ready engine of the version that gets copies, counted as busy until it is given back."""
        split = self.split
        engine = least_busy(each for each in self.engines if split and each.version == split.version)
        return self._taken(engine) if engine else None

    def give_back(self, engine: Engine) -> None:
        """Say that a request which took the engine is done with it."""
        engine.in_flight -= 1
        if not engine.in_flight:
            engine.idle.set()

    def _taken(self, engine: Engine, beginnings: Sequence[int] = ()) -> Engine:
        self._affinity.note(beginnings, engine)
        engine.in_flight += 1
        engine.idle.clear()
        return engine

    async def _wait_for_one(
        self, engines: Sequence[Engine], key: RoutingKey | None, beginnings: Sequence[int]
    ) -> Engine:
        try:
            async with asyncio.timeout(self._patience_s), self._changed:
                while (engine := self._chosen(engines, key, beginnings)) is None:
                    if not self._about_to_be(able(engines, key)):
                        break
                    await self._changed.wait()
        except TimeoutError:
            engine = None
        if (
            engine is None
            and isinstance(key, VersionPin)
            and self.ready
            and not self._about_to_be(key.able(self.engines))
        ):
            raise key.refused(self.served)
        if engine is None:
            raise RequestRefused("no engine is ready", status=503, code="engine_unavailable", retry_after_s=2.0)
        return engine


def chosen(
    engines: Sequence[Engine],
    split: TrafficSplit | None,
    key: RoutingKey | None,
    knowing: Sequence[Container[int]] = (),
) -> Engine | None:
    """The ready engine that answers a request of a key, if any; of several `best` says which.

    The champion's engines stand in for the one that is being tried, but never the other way round.
    """
    if isinstance(key, VersionPin):
        return best(key.able(engines), knowing)
    if split is None:
        return best(engines, knowing)
    if key is not None and split.answers(key):
        tried = best((each for each in engines if each.version == split.version), knowing)
        if tried is not None:
            return tried
    return best((each for each in engines if each.version != split.version), knowing)


def able(engines: Sequence[Engine], key: RoutingKey | None) -> Sequence[Engine]:
    """The engines that may answer a request of a key, now or when they are ready."""
    return key.able(engines) if isinstance(key, VersionPin) else engines


def best(engines: Iterable[Engine], knowing: Sequence[Container[int]] = ()) -> Engine | None:
    """Of the ready engines one that knows the beginning of the conversation, unless it is overloaded; else the least
    busy one.

    `knowing` are the numbers of those who know one, the longest first.
    """
    if not knowing:
        return least_busy(engines)
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    least = least_busy(ready)
    for numbers in knowing:
        usual = least_busy(engine for engine in ready if engine.number in numbers)
        if least and usual and not overloaded(usual.in_flight, least.in_flight):
            return usual
    return least


def least_busy(engines: Iterable[Engine]) -> Engine | None:
    """The ready engine with the least in flight, if any."""
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    return min(ready, key=lambda engine: engine.in_flight, default=None)
