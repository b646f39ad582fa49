"""Keeps engines serving the champion: our own are started again, those of others are attached."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.process import EngineProcess
from tuneloop.explorer.engines.proof.reload_trial import ReloadTrial, ServedWeights, require_samples_of_the_policy
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.proxy.grammars import give_first_grammar
from tuneloop.explorer.versions.loading import (
    KnownProbes,
    Verifier,
    actor_of,
    known_fingerprints,
    load,
    servable_champion,
)
from tuneloop.shared.checkpoints import VerifiedProbe
from tuneloop.shared.errors import (
    CheckpointRejected,
    CheckpointUnreadable,
    EngineError,
    EnvironmentRefused,
    LedgerUnavailable,
    TuneloopError,
)
from tuneloop.shared.experience import since_boot
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.operations.engines import plugin_sentence

log = structlog.get_logger()

#: Between an engine's end and its next start; twice as long each time, unless it served for _LIVED_S.
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_LIVED_S = 60.0

#: How often an engine is asked whether it is healthy, and how many times in a row it may fail to say so.
_LOOK_S, _MISSES = 0.5, 3

#: An engine that stands still for so many seconds is started again: by then an alarm says so (diagnosis.py).
_STUCK_S = 60.0

#: The states of an engine that was brought up.
_RUNNING = (EngineState.READY, EngineState.RELOADING, EngineState.DOWN)

_FRESH = "versions are loaded by fresh engines, as with explorer.on_reload: restart, which also spares this trial"


class EngineSupervisor:
    """Runs an engine of our own. Where the place is spare, nothing runs there until an engine is started."""

    def __init__(
        self,
        engine: Engine,
        process: EngineProcess,
        *,
        fleet: Fleet,
        champion: Callable[[], Awaitable[tuple[Version, VerifiedProbe | None]]],
        health_timeout_s: float,
        trial: "FleetTrial | None" = None,
    ) -> None:
        """`champion` says what to start it with; `trial` finds out whether engines can load versions in place."""
        self._engine = engine
        self._process = process
        self._fleet = fleet
        self._champion = champion
        self._health_timeout_s = health_timeout_s
        self._trial = trial
        #: How often its process was started: a process that was ended on purpose is no engine that has died.
        self._starts = 0
        engine.starter = self

    async def start_anew(self, actor: Path) -> None:
        await self._process.stop()
        self._engine.control.reset()
        try:
            await self._start(actor)
        except EnvironmentRefused as error:
            await self._process.stop()
            raise EngineError(str(error)) from error

    async def stop(self) -> None:
        await self._process.stop()

    def has_room(self) -> bool:
        return self._process.has_room()

    async def _start(self, actor: Path) -> None:
        self._starts += 1
        await self._process.start(self._engine.control.initial_weights(actor))
        control = self._engine.control
        await control.finish_start(actor)
        if control.drafts:
            try:
                await require_samples_of_the_policy(control)
            except EngineError as error:
                raise EnvironmentRefused(f"explorer.rollout_model.engine_args: {error}") from error
        await give_first_grammar(control)
        await _find_plugin(self._engine)

    async def run(self) -> None:
        """Run the engine for ever. Raises EnvironmentRefused if it never gets up in the first place."""
        engine, loop = self._engine, asyncio.get_running_loop()
        pause, was_up = _PAUSE_S, engine.state is EngineState.SPARE
        while True:
            up_since = loop.time() + _LONGEST_PAUSE_S  # never, until it is up
            try:
                await self._bring_up(must=not was_up)
                up_since, was_up = loop.time(), True
                reason = await self._end()
                if reason is not None:
                    log.error("engine_down", engine=engine.number, reason=reason)
            except LedgerUnavailable as error:
                log.warning("database_away", reason=str(error))
            except CheckpointUnreadable as error:
                log.warning("engine_not_started", engine=engine.number, reason=str(error))
            except (EnvironmentRefused, CheckpointRejected, EngineError) as error:
                if not was_up:
                    raise
                log.error("engine_not_restarted", engine=engine.number, reason=str(error))
            finally:
                if engine.state is not EngineState.SPARE:
                    await self._fleet.set_state(engine, EngineState.DOWN)
                    await self._process.stop()
            if engine.state is EngineState.SPARE:
                continue
            if loop.time() - up_since > _LIVED_S:
                pause = _PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _bring_up(self, *, must: bool) -> None:
        """Have the engine in rotation, proven. What goes wrong is EnvironmentRefused where it `must` work."""
        engine = self._engine
        if engine.state is EngineState.SPARE:
            return await self._fleet.wait_for_state(engine, *_RUNNING)
        champion, probe = await self._champion()
        try:
            await self._start(actor_of(champion))
            if self._trial and await self._trial.fails(engine, champion):
                await self.start_anew(actor_of(champion))
            if probe:
                await engine.control.prove(probe)
        except (CheckpointRejected, EngineError) as error:
            if must and not isinstance(error, CheckpointUnreadable):
                raise _refusal(error, champion) from error
            raise
        await self._fleet.begin_load(engine)
        await self._fleet.end_load(engine, champion.version)
        await self._fleet.set_state(engine, EngineState.READY)
        log.info("engine_ready", engine=engine.number, version=champion.version)

    async def _end(self) -> str | None:
        """Why an engine that was ready must be started again, when that is so; None: its place is spare now."""
        engine = self._engine
        while True:
            starts = self._starts
            reason = await self._first_sign()
            if engine.state is EngineState.DOWN or not engine.restarts:
                return reason
            if engine.state is EngineState.READY and self._starts == starts:
                return reason
            # What took it out of rotation ends it, and starts it again.
            await self._fleet.wait_for_state(engine, EngineState.READY, EngineState.DOWN, EngineState.SPARE)
            if engine.state is EngineState.SPARE:
                return None

    async def _first_sign(self) -> str:
        ill = asyncio.ensure_future(_until_ill(self._engine, self._health_timeout_s))
        waiting = {
            asyncio.ensure_future(self._process.wait()): "its process ended",
            asyncio.ensure_future(self._fleet.wait_for_state(self._engine, EngineState.DOWN)): "it was cancelled",
            ill: "",
        }
        try:
            ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return next(reason or ill.result() for task, reason in waiting.items() if task in ended)


async def _find_plugin(engine: Engine) -> None:
    await engine.control.find_plugin()
    if engine.packs is False:
        log.warning(
            "engine_without_plugin", engine=engine.number, sentence=plugin_sentence(of_others=engine.starter is None)
        )


class FleetTrial:
    def __init__(self, fleet: Fleet, *, head_is_seen: bool) -> None:
        """`head_is_seen`: a head that is not renewed with the embeddings that it is tied to would show."""
        self._fleet = fleet
        self._head_is_seen = head_is_seen
        self._trial = ReloadTrial()

    async def fails(self, engine: Engine, version: Version) -> bool:
        weights = ServedWeights(actor_of(version), known_fingerprints(version), self._head_is_seen)
        fault, tried = await self._trial.fault(engine.control, weights)
        if tried and fault is not None:
            log.warning("reload_is_not_exact", engine=engine.number, reason=fault, sentence=_FRESH)
            for each in self._fleet.engines:
                each.restarts = each.starter is not None
        return tried and fault is not None


def _refusal(error: TuneloopError, champion: Version) -> EnvironmentRefused:
    if isinstance(error, EnvironmentRefused):
        return error
    return EnvironmentRefused(
        f"checkpoint_root_dir: version {champion.version}, which is to be served, cannot be: {error}; restore "
        f"{champion.path} from a copy"
    )


async def _until_ill(engine: Engine, health_timeout_s: float) -> str:
    """Why an engine is to be ended, once it is so: it stands still, or is not healthy. What works has time."""
    misses, since, movement = 0, 0.0, engine.movement
    while misses < _MISSES:
        await asyncio.sleep(_LOOK_S)
        began = time.monotonic()
        if movement.still_s >= _STUCK_S and not (engine.restarts or movement.is_busy(began - _STUCK_S)):
            return "it is asked for something, and does not work on it"
        healthy = await engine.control.healthy(health_timeout_s)
        misses = 0 if healthy or engine.state is not EngineState.READY else misses + 1
        since = began if misses <= 1 else since
        if misses >= _MISSES and movement.is_busy(since):
            log.warning("engine_busy", engine=engine.number, sentence="it misses health checks, and works")
            misses = 0
    return "it does not say that it is healthy"


#: The longest time between two tries to take an engine into use.
_LONGEST_RETRY_S = 60.0

_NO_LIFE = (
    "it says neither when it began (/metrics, with one API server) nor its id (/server_info, with "
    "VLLM_SERVER_DEV_MODE=1; of several API servers with our --worker-extension-cls only): that it was restarted is "
    "noticed only where it misses a health check"
)

#: The states of the host of an engine that is up.
_UP = (EngineState.READY, EngineState.RELOADING)


class Champions:
    """Gives engines of others the champion, and proves that they have it."""

    def __init__(self, ledger: Ledger, verifier: Verifier, probes: KnownProbes) -> None:
        self._ledger = ledger
        self._verifier = verifier
        self._probes = probes

    async def give(self, engine: Engine, fleet: Fleet) -> Version:
        """Bring the engine to the champion, unless no version was ever published. Raises CheckpointRejected."""
        champion, _ = await servable_champion(self._ledger, self._verifier)
        if not champion.is_base or len(await asyncio.to_thread(self._ledger.versions.all)) > 1:
            await load(engine, champion, fleet=fleet)
        await fleet.end_load(engine, champion.version)
        await self._probes.prove(engine, champion)
        if champion.is_base:
            with suppress(EngineError, LedgerUnavailable):  # the periodic proof tries again
                await self._probes.of(engine)
        return champion


class Attachment:
    """An engine of others, used while it is healthy and proven to have the champion's weights, and its `host` is up."""

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
        """`doubt_restarted` is called with an engine that was started again, and when it was last known not to be.

        In seconds since this machine was started.
        """
        self._engine = engine
        self._fleet = fleet
        self._champions = champions
        self._health_timeout_s = health_timeout_s
        self._doubt_restarted = doubt_restarted
        self._host = host
        self._misses, self._missed_at = 0, 0.0
        self._failures = 0
        self._instance: str | None = None
        self._alive_at = 0.0

    async def run(self, metrics: Metrics) -> None:
        await every(_LOOK_S, self._turn, task="engine_attachment", metrics=metrics)

    async def _turn(self) -> float | None:
        engine, host = self._engine, self._host
        hosted = host is None or host.state in _UP
        looked_at = since_boot()
        healthy = hosted and await engine.control.healthy(self._health_timeout_s)
        missed = self._misses > 0
        self._missed_at = self._missed_at if missed else time.monotonic()
        self._misses = 0 if healthy else self._misses + 1 if hosted else _MISSES
        self._failures = self._failures if healthy else 0
        if healthy and engine.state in {EngineState.STARTING, EngineState.DOWN}:
            return await self._attach()
        if healthy and engine.state is EngineState.READY:
            await self._see_instance(looked_at, missed=missed)
        elif self._misses >= _MISSES and engine.state is EngineState.READY and engine.movement.is_busy(self._missed_at):
            self._misses = 0  # its health check waits for the requests that it works on
        elif self._misses >= _MISSES and engine.state is EngineState.READY:
            log.error("engine_down", engine=engine.number, reason="it does not say that it is healthy")
            await self._fleet.set_state(engine, EngineState.DOWN)
        return None

    async def _attach(self) -> float | None:
        """Take the engine into rotation, once it is proven. After a failure: how long to wait, in seconds."""
        engine, control, began = self._engine, self._engine.control, since_boot()
        try:
            control.reset()
            instance = await control.instance_id()
            await require_samples_of_the_policy(control)
            await give_first_grammar(control)
            champion = await self._champions.give(engine, self._fleet)
            await _find_plugin(engine)
            if await control.instance_id() != instance:
                raise EngineError("it was restarted while its weights were loaded")
        except (EngineError, CheckpointRejected) as error:
            log.warning("engine_not_attached", engine=engine.number, reason=str(error))
            self._failures += 1
            return min(_LOOK_S * float(2**self._failures), _LONGEST_RETRY_S)
        if instance is None:
            log.warning("engine_life_unknown", engine=engine.number, sentence=_NO_LIFE)
        self._failures, self._instance, self._alive_at = 0, instance, began
        await self._fleet.set_state(engine, EngineState.READY)
        log.info("engine_attached", engine=engine.number, version=champion.version)
        return None

    async def _see_instance(self, looked_at: float, *, missed: bool) -> None:
        """Take an engine out of rotation that was started again since it was proven, and maybe answered since."""
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
