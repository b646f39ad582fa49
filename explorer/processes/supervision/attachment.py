"""Keeps engines that somebody else runs in use, with the champion's weights."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.proof.sampling_trial import require_samples_of_the_policy
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.grammars import give_first_grammar
from tuneloop.explorer.versions.loading import KnownProbes, Verifier, load, servable_champion
from tuneloop.shared import steady_time
from tuneloop.shared.errors import CheckpointRejected, EngineError, LedgerUnavailable
from tuneloop.shared.ledger.ledger import Ledger, Version

log = structlog.get_logger()

#: How often an engine is looked at, and how many times in a row it may fail to say that it is healthy.
_LOOK_S, _MISSES = 0.5, 3

#: The longest time between two tries to take an engine into use.
_LONGEST_PAUSE_S = 60.0

_NO_LIFE = (
    "it says neither when it began (/metrics, with one API server) nor its id (/server_info, with "
    "VLLM_SERVER_DEV_MODE=1; of several API servers with our --worker-extension-cls only): that it was restarted is "
    "noticed only where it misses a health check"
)

#: The states of the host of an engine that is up.
_UP = (EngineState.READY, EngineState.RELOADING, EngineState.ASLEEP)


class Champions:
    """Gives engines of others the champion, and proves that they have it."""

    def __init__(self, ledger: Ledger, verifier: Verifier, probes: KnownProbes) -> None:
        self._ledger = ledger
        self._verifier = verifier
        self._probes = probes

    async def give(self, engine: Engine, fleet: Fleet) -> Version:
        """Bring the engine to the champion's weights, whatever an earlier explorer left in it, and perhaps left paused.

        Only where no version was ever published it is taken as it is: so that it needs no weight routes just to serve.
        Raises CheckpointRejected unless its weights are proven then.
        """
        champion, _ = await servable_champion(self._ledger, self._verifier)
        if champion.version or len(await asyncio.to_thread(self._ledger.versions.all)) > 1:
            await load(engine, champion, fleet=fleet)
        await fleet.end_load(engine, champion.version)
        await self._probes.prove(engine, champion)
        if not champion.version:
            with suppress(EngineError, LedgerUnavailable):  # the periodic proof tries again
                await self._probes.of(engine)
        return champion


class Attachment:
    """An engine that somebody else runs, used while it is healthy and has been proven to have the champion's weights.

    With a `host`, which has the same process, it is up only as long as that is.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        fleet: Fleet,
        champions: Champions,
        health_timeout_s: float,
        doubt_restarted: Callable[[Engine, float], Awaitable[None]],
        host: Engine | None = None,
    ) -> None:
        """`doubt_restarted` is called with an engine that was started anew, and when it was last known not to be.

        In seconds since this machine was started.
        """
        self._engine = engine
        self._fleet = fleet
        self._champions = champions
        self._health_timeout_s = health_timeout_s
        self._doubt_restarted = doubt_restarted
        self._host = host
        self._misses = 0
        self._failures = 0
        self._instance: str | None = None
        self._alive_at = 0.0

    async def run(self, metrics: Metrics) -> None:
        """Look at the engine every half a second."""
        await every(_LOOK_S, self._turn, task="engine_attachment", metrics=metrics)

    async def _turn(self) -> float | None:
        engine, host = self._engine, self._host
        hosted = host is None or host.state in _UP
        looked_at = steady_time.since_boot()
        healthy = hosted and await engine.control.healthy(self._health_timeout_s)
        missed = self._misses > 0
        self._misses = 0 if healthy else self._misses + 1 if hosted else _MISSES
        self._failures = self._failures if healthy else 0
        if healthy and engine.state in {EngineState.STARTING, EngineState.DOWN}:
            return await self._attach()
        if healthy and engine.state is EngineState.READY:
            await self._see_instance(looked_at, missed=missed)
        elif self._misses >= _MISSES and engine.state is EngineState.READY:
            log.error("engine_down", engine=engine.number, reason="it does not say that it is healthy")
            await self._fleet.set_state(engine, EngineState.DOWN)
        return None

    async def _attach(self) -> float | None:
        """Take the engine into rotation, once it is proven. After a failure: how long to wait, in seconds."""
        engine, control, began = self._engine, self._engine.control, steady_time.since_boot()
        try:
            control.reset()
            instance = await control.instance_id()
            await require_samples_of_the_policy(control)
            await give_first_grammar(control)
            champion = await self._champions.give(engine, self._fleet)
            if await control.instance_id() != instance:
                raise EngineError("it was restarted while its weights were loaded")
        except (EngineError, CheckpointRejected) as error:
            log.warning("engine_not_attached", engine=engine.number, reason=str(error))
            self._failures += 1
            return min(_LOOK_S * float(2**self._failures), _LONGEST_PAUSE_S)
        if instance is None:
            log.warning("engine_life_unknown", engine=engine.number, sentence=_NO_LIFE)
        self._failures, self._instance, self._alive_at = 0, instance, began
        await self._fleet.set_state(engine, EngineState.READY)
        log.info("engine_attached", engine=engine.number, version=champion.version)
        return None

    async def _see_instance(self, looked_at: float, *, missed: bool) -> None:
        """Take an engine out of rotation that was started anew since it was proven, and maybe answered since."""
        engine = self._engine
        try:
            instance = await engine.control.instance_id()
        except EngineError:
            self._misses += 1
            return
        restarted = missed if self._instance is None else instance != self._instance
        if not restarted:
            self._alive_at = looked_at
        elif engine.state is EngineState.READY:
            log.error("engine_restarted", engine=engine.number, version=engine.version)
            await self._fleet.set_state(engine, EngineState.DOWN)
            if instance is not None:
                await self._doubt_restarted(engine, self._alive_at)
