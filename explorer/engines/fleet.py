"""The engines, and which of them answers a request.

The decisions are synchronous, so no lock is needed: nothing else runs between looking and taking.
"""

import asyncio
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol

from tuneloop.explorer.engines.adapter_names import ModelRenaming
from tuneloop.explorer.engines.affinity import PrefixAffinity, is_overloaded, is_too_busy_for_rendezvous, rendezvous
from tuneloop.explorer.engines.client import EngineHttp
from tuneloop.explorer.engines.version_routing import TrafficSplit, VersionPin
from tuneloop.explorer.engines.vllm import EngineControl
from tuneloop.shared.errors import RequestRefused

#: What the engine of a request is chosen by: the key of its user or task, or the version that must answer it.
RoutingKey = str | VersionPin


class EngineState(StrEnum):
    """The state of an engine."""

    STARTING = "starting"
    READY = "ready"
    RELOADING = "reloading"
    #: In the trainer's turn at the GPU: it answers afterwards.
    ASLEEP = "asleep"
    DOWN = "down"
    #: Nothing runs there: room for a new engine beside the one that it will replace.
    SPARE = "spare"


class EngineStarter(Protocol):
    """Starts and ends the process of an engine of our own, for who has taken the engine out of rotation."""

    async def start_anew(self, actor: Path) -> None:
        """Start it with the weights in a folder, after its end if it runs. Raises EngineError."""

    async def stop(self) -> None:
        """End it."""

    def has_room(self) -> bool:
        """Whether one more engine can be started now beside those that run."""


class Engine:
    """One vLLM server: where it answers, what it serves, and how much this process has in flight there.

    `loads` counts how often its weights changed, so that a reply can tell whether they did while it was sampled.
    `swaps` counts what begins and ends with another version, be it an adapter beside those that are in flight.
    """

    def __init__(self, number: int, http: EngineHttp, control: EngineControl | None = None) -> None:
        """`control` is for the process that runs the engine and swaps its weights."""
        self.number = number
        self.http = http
        self._control = control
        #: Of an engine of our own; None: it is of others.
        self.starter: EngineStarter | None = None
        #: Whether it gets other weights by being started anew with them; it can load them in place otherwise.
        self.restarts = False
        self.state = EngineState.STARTING
        self.version = 0
        self.in_flight = 0
        self.loads = 0
        self.swaps = 0
        self._proof = ""
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

    @property
    def proof(self) -> str:
        """What its weights were proven by when they were last proven right; empty if they never were."""
        return self._control.proof if self._control is not None else self._proof

    @proof.setter
    def proof(self, proof: str) -> None:
        self._proof = proof

    def begin_load(self) -> None:
        """Weights begin to change under what is in flight; adapters do not."""
        self.swaps += 1
        if self._control is None or self._control.loads_in_place:
            self.loads += 1

    def end_load(self, version: int) -> None:
        """From now on it answers with this version."""
        self.swaps += 1
        self.version = version
        if self._control is not None:
            self.http.renaming = self._control.renaming


class EngineStatus(Protocol):
    """The state of an engine as another process publishes it."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def state(self) -> EngineState:
        """Its state."""

    @property
    def version(self) -> int:
        """The version that it serves."""

    @property
    def loads(self) -> int:
        """How often its weights changed."""

    @property
    def proof(self) -> str:
        """What its weights were proven by."""

    @property
    def renaming(self) -> ModelRenaming | None:
        """The adapter that it serves."""


class FleetReplicas(Protocol):
    """Copies of this fleet in other processes: they must have a change before its author goes on."""

    async def publish(self, engine: Engine) -> None:
        """Return when all have the engine's present state."""

    async def set_split(self, split: TrafficSplit | None) -> None:
        """Return when all split their requests so."""

    async def wait_until_idle(self, engine: Engine) -> None:
        """Return when none has a request in flight on the engine."""


class Fleet:
    """All engines. Requests wait while none is ready, for at most `wait_timeout_s`.

    With a `split`, engines that serve the canary version get its share of the requests and no others.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        wait_timeout_s: float,
        replicas: FleetReplicas | None = None,
        is_alone: bool = True,
    ) -> None:
        """`is_alone`: no other process sends requests of the same conversations to the engines."""
        self.engines = list(engines)
        self._is_alone = is_alone
        self.split: TrafficSplit | None = None
        self._wait_timeout_s = wait_timeout_s
        self._replicas = replicas
        self._affinity = PrefixAffinity()
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> bool:
        """Whether a request would be answered: some engine is ready, or will be in a moment."""
        return self._will_be_ready(self.engines)

    @property
    def served_versions(self) -> list[int]:
        """The versions that answer now."""
        return sorted({each.version for each in self.engines if each.state is EngineState.READY})

    @staticmethod
    def _will_be_ready(engines: Iterable[Engine]) -> bool:
        will = {EngineState.READY, EngineState.RELOADING, EngineState.ASLEEP}
        return any(engine.state in will for engine in engines)

    async def set_state(self, engine: Engine, state: EngineState) -> None:
        """Change an engine's state and wake the requests that wait for it."""
        engine.state = state
        await self._publish(engine)

    async def begin_load(self, engine: Engine) -> None:
        """Publish that an engine's weights begin to change: what is in flight there is sampled from two versions."""
        engine.begin_load()
        await self._publish(engine)

    async def end_load(self, engine: Engine, version: int) -> None:
        """Publish which version an engine serves."""
        engine.end_load(version)
        await self._publish(engine)

    async def set_split(self, split: TrafficSplit | None) -> None:
        """Split the requests between the champion and a canary version; None: there is no canary."""
        self.split = split
        if self._replicas is not None:
            await self._replicas.set_split(split)
        async with self._changed:
            self._changed.notify_all()

    async def apply(self, status: Sequence[EngineStatus]) -> None:
        """Take over the state of engines that another process has published."""
        for each in status:
            engine = self.engines[each.number]
            engine.state, engine.version, engine.loads = each.state, each.version, each.loads
            engine.http.renaming, engine.proof = each.renaming, each.proof
        async with self._changed:
            self._changed.notify_all()

    async def _publish(self, engine: Engine) -> None:
        if self._replicas is not None:
            await self._replicas.publish(engine)
        async with self._changed:
            self._changed.notify_all()

    async def wait_until_idle(self, engine: Engine) -> None:
        """Wait until no process has a request in flight on the engine."""
        await engine.idle.wait()
        if self._replicas is not None:
            await self._replicas.wait_until_idle(engine)

    async def wait_for_state(self, engine: Engine, *states: EngineState) -> None:
        """Wait until the engine has one of these states."""
        async with self._changed:
            await self._changed.wait_for(lambda: engine.state in states)

    async def wait_until_awake(self) -> None:
        """Wait until no engine sleeps in the trainer's turn."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(each.state is not EngineState.ASLEEP for each in self.engines))

    async def acquire(self, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()) -> Engine:
        """The engine that answers a request of a key, counted as busy until it is released.

        Without a key it is one of the champion's. `prefix_hashes` are the request's (`explorer/engines/affinity.py`).
        """
        engine = self._choose(self.engines, key, prefix_hashes)
        return self._mark_busy(engine or await self._wait_for_one(self.engines, key, prefix_hashes), prefix_hashes)

    def acquire_another(
        self, than: Engine, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but another engine than this one, of another version if that may answer; None if none is ready."""
        others = self._others(than)
        engine = self._choose([each for each in others if each.version != than.version], key, prefix_hashes)
        engine = engine or self._choose(others, key, prefix_hashes)
        return self._mark_busy(engine, prefix_hashes) if engine else None

    async def wait_for_another(
        self, than: Engine, key: RoutingKey | None = None, prefix_hashes: Sequence[int] = ()
    ) -> Engine | None:
        """The same, but wait for an engine that is being reloaded; None if no other is ready or will be."""
        others = self._others(than)
        engine = self._choose(others, key, prefix_hashes)
        if engine is None and self._will_be_ready(eligible_engines(others, key)):
            engine = await self._wait_for_one(others, key, prefix_hashes)
        return self._mark_busy(engine, prefix_hashes) if engine else None

    def _others(self, than: Engine) -> list[Engine]:
        return [each for each in self.engines if each is not than]

    def _choose(self, engines: Sequence[Engine], key: RoutingKey | None, prefix_hashes: Sequence[int]) -> Engine | None:
        with_prefix = self._affinity.engines_with_prefix(prefix_hashes, engines) if prefix_hashes else ()
        rendezvous_order = rendezvous(prefix_hashes, engines) if prefix_hashes and not self._is_alone else ()
        return choose_engine(engines, self.split, key, with_prefix, rendezvous_order)

    def acquire_for_shadow(self) -> Engine | None:
        """A ready engine of the version that gets shadow requests, counted as busy until it is released."""
        split = self.split
        engine = least_busy(each for each in self.engines if split and each.version == split.version)
        return self._mark_busy(engine) if engine else None

    def release(self, engine: Engine) -> None:
        """End a request that has acquired the engine."""
        engine.in_flight -= 1
        if not engine.in_flight:
            engine.idle.set()

    def _mark_busy(self, engine: Engine, prefix_hashes: Sequence[int] = ()) -> Engine:
        self._affinity.record(prefix_hashes, engine)
        engine.in_flight += 1
        engine.idle.clear()
        return engine

    async def _wait_for_one(
        self, engines: Sequence[Engine], key: RoutingKey | None, prefix_hashes: Sequence[int]
    ) -> Engine:
        try:
            async with asyncio.timeout(self._wait_timeout_s), self._changed:
                while (engine := self._choose(engines, key, prefix_hashes)) is None:
                    if not self._will_be_ready(eligible_engines(engines, key)):
                        break
                    await self._changed.wait()
        except TimeoutError:
            engine = None
        if (
            engine is None
            and isinstance(key, VersionPin)
            and self.ready
            and not self._will_be_ready(key.filter(self.engines))
        ):
            raise key.not_served_error(self.served_versions)
        if engine is None:
            raise RequestRefused("no engine is ready", status=503, code="engine_unavailable", retry_after_s=2.0)
        return engine


def choose_engine(
    engines: Sequence[Engine],
    split: TrafficSplit | None,
    key: RoutingKey | None,
    with_prefix: Sequence[Container[int]] = (),
    rendezvous_order: Sequence[int] = (),
) -> Engine | None:
    """The ready engine that answers a request of a key, if any; of several `pick_engine` decides.

    The champion's engines stand in for the canary's, but never the other way round.
    """
    pick = partial(pick_engine, with_prefix=with_prefix, rendezvous_order=rendezvous_order)
    if isinstance(key, VersionPin):
        return pick(key.filter(engines))
    if split is None:
        return pick(engines)
    if key is not None and split.answers(key):
        canary = pick(each for each in engines if each.version == split.version)
        if canary is not None:
            return canary
    return pick(each for each in engines if each.version != split.version)


def eligible_engines(engines: Sequence[Engine], key: RoutingKey | None) -> Sequence[Engine]:
    """The engines that may answer a request of a key, now or when they are ready."""
    return key.filter(engines) if isinstance(key, VersionPin) else engines


def pick_engine(
    engines: Iterable[Engine], with_prefix: Sequence[Container[int]] = (), rendezvous_order: Sequence[int] = ()
) -> Engine | None:
    """Of the ready engines one that has a prefix of the conversation cached, or where all workers would send it, unless
    that is too busy; else the least busy one.

    `with_prefix` are the numbers of the engines that have one, the longest prefix first; `rendezvous_order` those of
    all, the preferred one first.
    """
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    least = least_busy(ready)
    if least is None:
        return None
    for numbers in with_prefix:
        preferred = least_busy(engine for engine in ready if engine.number in numbers)
        if preferred and not is_overloaded(preferred.in_flight, least.in_flight):
            return preferred
    by_number = {engine.number: engine for engine in ready}
    preferred_first = (by_number[number] for number in rendezvous_order if number in by_number)
    return next(
        (engine for engine in preferred_first if not is_too_busy_for_rendezvous(engine.in_flight, least.in_flight)),
        least,
    )


def surge_capacity(engines: Iterable[Engine]) -> Engine | None:
    """Where one more engine can be started now, beside those that run."""
    places = (each for each in engines if each.state is EngineState.SPARE and each.starter)
    return next((each for each in places if each.starter and each.starter.has_room()), None)


def least_busy(engines: Iterable[Engine]) -> Engine | None:
    """The ready engine with the least in flight, if any."""
    ready = [engine for engine in engines if engine.state is EngineState.READY]
    return min(ready, key=lambda engine: engine.in_flight, default=None)
