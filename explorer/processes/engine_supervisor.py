"""Keeps engines serving the champion: starts them, and again when they die or hang; attaches to those of others."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.metrics import Metrics
from tuneloop.explorer.versions.loading import actor_of, load
from tuneloop.shared.checkpoint import Probe
from tuneloop.shared.errors import (
    CheckpointRejected,
    EngineError,
    EnvironmentRefused,
    LedgerUnavailable,
    TuneloopError,
)
from tuneloop.shared.ledger.ledger import Ledger, Version

log = structlog.get_logger()

#: Between an engine's end and its next start; twice as long each time, unless it served for _LIVED_S.
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_LIVED_S = 60.0

#: How often an engine is asked whether it is healthy, and how many times in a row it may fail to say so.
_LOOK_S, _MISSES = 0.5, 3


class SupervisedProcess(Protocol):
    """What an engine of our own runs in."""

    async def start(self, model: Path) -> None:
        """Start the engine with the weights in `model` and wait until it is healthy. Raises EnvironmentRefused."""

    async def wait(self) -> int:
        """Wait until it is no more."""

    async def stop(self) -> None:
        """End it, and everything that it started."""


async def keep_running(
    engine: Engine,
    process: SupervisedProcess,
    *,
    fleet: Fleet,
    ledger: Ledger,
    verify: Callable[[Version], Awaitable[Probe]],
    health_timeout_s: float,
) -> None:
    """Run an engine of our own for ever. Raises EnvironmentRefused if it never gets up in the first place."""
    pause, was_up, loop = _PAUSE_S, False, asyncio.get_running_loop()
    while True:
        up_since = loop.time() + _LONGEST_PAUSE_S  # never, until it is up
        try:
            champion = await asyncio.to_thread(ledger.versions.champion)
            probe = await verify(champion) if champion.version else None
            await process.start(engine.control.initial_weights(actor_of(champion)))
            await engine.control.finish_start(actor_of(champion))
            if probe:
                await engine.control.prove(probe)
            await fleet.begin_load(engine)
            await fleet.end_load(engine, champion.version)
            await fleet.set_state(engine, EngineState.READY)
            log.info("engine_ready", engine=engine.number, version=champion.version)
            up_since, was_up = loop.time(), True
            reason = await _end_of(engine, process, fleet, health_timeout_s)
            log.error("engine_down", engine=engine.number, reason=reason)
        except LedgerUnavailable as error:
            log.warning("database_away", reason=str(error))
        except (EnvironmentRefused, CheckpointRejected, EngineError) as error:
            if not was_up:
                raise _refusal(error, champion) from error
            log.error("engine_not_restarted", engine=engine.number, reason=str(error))
        finally:
            await fleet.set_state(engine, EngineState.DOWN)
            await process.stop()
        if loop.time() - up_since > _LIVED_S:
            pause = _PAUSE_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _refusal(error: TuneloopError, champion: Version) -> EnvironmentRefused:
    """Why the service cannot start."""
    if isinstance(error, EnvironmentRefused):
        return error
    return EnvironmentRefused(
        f"checkpoint_root_dir: version {champion.version}, which is to be served, cannot be: {error}; restore "
        f"{champion.path} from a copy"
    )


async def _end_of(engine: Engine, process: SupervisedProcess, fleet: Fleet, health_timeout_s: float) -> str:
    """Why an engine that was ready must be started again, when that is so."""
    waiting = {
        asyncio.ensure_future(process.wait()): "its process ended",
        asyncio.ensure_future(fleet.wait_until_down(engine)): "it was given up",
        asyncio.ensure_future(_until_ill(engine, health_timeout_s)): "it does not say that it is healthy",
    }
    try:
        ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return next(reason for task, reason in waiting.items() if task in ended)


async def _until_ill(engine: Engine, health_timeout_s: float) -> None:
    """Return when a ready engine has failed to say that it is healthy too often; one that is reloaded has time."""
    misses = 0
    while misses < _MISSES:
        await asyncio.sleep(_LOOK_S)
        healthy = await engine.control.healthy(health_timeout_s)
        misses = 0 if healthy or engine.state is not EngineState.READY else misses + 1


async def stay_attached(
    engine: Engine,
    *,
    fleet: Fleet,
    ledger: Ledger,
    metrics: Metrics,
    health_timeout_s: float,
    host: Engine | None = None,
) -> None:
    """Use an engine that somebody else runs whenever it is healthy; first it is given the champion's weights.

    With a `host`, which has the same process, it is up only as long as that is.
    """
    misses = 0

    async def turn() -> None:
        nonlocal misses
        hosted = host is None or host.state in {EngineState.READY, EngineState.RELOADING}
        healthy = hosted and await engine.control.healthy(health_timeout_s)
        misses = 0 if healthy else misses + 1 if hosted else _MISSES
        if healthy and engine.state in {EngineState.STARTING, EngineState.DOWN}:
            try:
                engine.control.reset()
                await engine.control.require_processed_logprobs()
                champion = await _give_champion(engine, fleet, ledger)
                await fleet.set_state(engine, EngineState.READY)
                log.info("engine_attached", engine=engine.number, version=champion.version)
            except EngineError as error:
                log.warning("engine_not_attached", engine=engine.number, reason=str(error))
        elif misses >= _MISSES and engine.state is EngineState.READY:
            log.error("engine_down", engine=engine.number, reason="it does not say that it is healthy")
            await fleet.set_state(engine, EngineState.DOWN)

    await every(_LOOK_S, turn, task="engine_attachment", metrics=metrics)


async def _give_champion(engine: Engine, fleet: Fleet, ledger: Ledger) -> Version:
    """Bring the engine to the champion's weights, whatever an earlier explorer left in it, and perhaps left paused.

    Only where no version was ever published it is taken as it is: so that it needs no weight routes just to serve.
    """
    champion = await asyncio.to_thread(ledger.versions.champion)
    if len(await asyncio.to_thread(ledger.versions.all)) > 1:
        await load(engine, champion, fleet=fleet)
    await fleet.end_load(engine, champion.version)
    return champion
