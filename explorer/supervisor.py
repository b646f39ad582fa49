"""Keeps engines serving the champion: starts them, and again when they die; attaches to those of others."""

import asyncio
from pathlib import Path

import structlog

from explorer.engine_process import EngineProcess
from explorer.fleet import Engine, EngineState, Fleet
from explorer.reload import actor_of, load, verified
from shared.errors import CheckpointRejected, EngineError, EnvironmentRefused, LedgerUnavailable, TuneloopError
from shared.ledger import Ledger, Version

log = structlog.get_logger()

_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
_LOOK_S = 0.5


async def keep_running(engine: Engine, process: EngineProcess, *, fleet: Fleet, ledger: Ledger, base: Path) -> None:
    """Run an engine of our own for ever. Raises EnvironmentRefused if it never gets up in the first place."""
    pause, was_up = _PAUSE_S, False
    while True:
        try:
            champion = await asyncio.to_thread(ledger.champion)
            probe = await verified(champion, base) if champion.version else None
            await process.start(actor_of(champion))
            if probe:
                await engine.control.prove(probe)
            await fleet.loading(engine)
            await fleet.loaded(engine, champion.version)
            await fleet.set(engine, EngineState.READY)
            log.info("engine_ready", engine=engine.number, version=champion.version)
            pause, was_up = _PAUSE_S, True
            await _until_it_ends(engine, process, fleet)
            log.error("engine_down", engine=engine.number)
        except LedgerUnavailable as error:
            log.warning("database_away", reason=str(error))
        except (EnvironmentRefused, CheckpointRejected, EngineError) as error:
            if not was_up:
                raise _refused(error, champion) from error
            log.error("engine_not_restarted", engine=engine.number, reason=str(error))
        finally:
            await fleet.set(engine, EngineState.DOWN)
            await process.stop()
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _refused(error: TuneloopError, champion: Version) -> EnvironmentRefused:
    """Why the service cannot start."""
    if isinstance(error, EnvironmentRefused):
        return error
    return EnvironmentRefused(
        f"checkpoint_root_dir: version {champion.version}, which is to be served, cannot be: {error}; restore "
        f"{champion.path} from a copy"
    )


async def _until_it_ends(engine: Engine, process: EngineProcess, fleet: Fleet) -> None:
    """Return when the process is no more or the reloader has given the engine up."""
    waiting = [asyncio.ensure_future(process.ended()), asyncio.ensure_future(fleet.until_down(engine))]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def stay_attached(engine: Engine, *, fleet: Fleet, ledger: Ledger) -> None:
    """Use an engine that somebody else runs whenever it is healthy; first it is given the champion's weights."""
    while True:
        healthy = await engine.control.healthy()
        if healthy and engine.state in {EngineState.STARTING, EngineState.DOWN}:
            try:
                await engine.control.require_processed_logprobs()
                champion = await _give_champion(engine, fleet, ledger)
                await fleet.set(engine, EngineState.READY)
                log.info("engine_attached", engine=engine.number, version=champion.version)
            except (EngineError, LedgerUnavailable) as error:
                log.warning("engine_not_attached", engine=engine.number, reason=str(error))
        elif not healthy and engine.state is EngineState.READY:
            log.error("engine_down", engine=engine.number)
            await fleet.set(engine, EngineState.DOWN)
        await asyncio.sleep(_LOOK_S)


async def _give_champion(engine: Engine, fleet: Fleet, ledger: Ledger) -> Version:
    """Bring the engine to the champion's weights, whatever an earlier explorer left in it, and perhaps left paused.

    Only where no version was ever published it is taken as it is: so that it needs no weight routes just to serve.
    """
    champion = await asyncio.to_thread(ledger.champion)
    if len(await asyncio.to_thread(ledger.versions)) > 1:
        await load(engine, champion, fleet=fleet)
    await fleet.loaded(engine, champion.version)
    return champion
