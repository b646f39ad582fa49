"""Keeps engines of our own serving the champion: starts them, and again when they die or hang."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.explorer.engines.proof.reload_trial import ReloadTrial, ServedWeights
from tuneloop.explorer.engines.proof.sampling_trial import require_samples_of_the_policy
from tuneloop.explorer.proxy.grammars import give_first_grammar
from tuneloop.explorer.versions.loading import (
    actor_of,
    known_fingerprints,
)
from tuneloop.shared.checkpoints.manifest import VerifiedProbe
from tuneloop.shared.errors import (
    CheckpointRejected,
    CheckpointUnreadable,
    EngineError,
    EnvironmentRefused,
    LedgerUnavailable,
    TuneloopError,
)
from tuneloop.shared.ledger.ledger import Version

log = structlog.get_logger()

#: Between an engine's end and its next start; twice as long each time, unless it served for _LIVED_S.
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_LIVED_S = 60.0

#: How often an engine is asked whether it is healthy, and how many times in a row it may fail to say so.
_LOOK_S, _MISSES = 0.5, 3

#: The states of an engine that was brought up.
_RUNNING = (EngineState.READY, EngineState.RELOADING, EngineState.DOWN)

_FRESH = "versions are taken up by fresh engines, as with explorer.on_reload: restart, which also spares this trial"


class SupervisedProcess(Protocol):
    """What an engine of our own runs in."""

    async def start(self, model: Path) -> None:
        """Start the engine with the weights in `model` and wait until it is healthy. Raises EnvironmentRefused."""

    async def wait(self) -> int:
        """Wait until it is no more."""

    async def stop(self) -> None:
        """End it, and everything that it started."""

    def has_room(self) -> bool:
        """Whether this machine has room for it beside what runs now."""


class EngineSupervisor:
    """Runs an engine of our own: starts it, again when it dies or hangs, anew when a version asks for that.

    It is its engine's EngineStarter. Where the place is spare, nothing runs there until somebody starts an engine.
    """

    def __init__(
        self,
        engine: Engine,
        process: SupervisedProcess,
        *,
        fleet: Fleet,
        champion: Callable[[], Awaitable[tuple[Version, VerifiedProbe | None]]],
        health_timeout_s: float,
        trial: "FleetTrial | None" = None,
    ) -> None:
        """`champion` says what to start it with; `trial` finds out whether engines can take up versions in place."""
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
        """See EngineStarter."""
        await self._process.stop()
        self._engine.control.reset()
        try:
            await self._start(actor)
        except EnvironmentRefused as error:
            await self._process.stop()
            raise EngineError(str(error)) from error

    async def stop(self) -> None:
        """See EngineStarter."""
        await self._process.stop()

    def has_room(self) -> bool:
        """See EngineStarter."""
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
        """Have the engine in rotation with the champion, proven; or wait until a fresh one is, where there was none.

        What goes wrong is EnvironmentRefused where it `must` work.
        """
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
            # Whoever has taken it out of rotation ends it, and starts it anew.
            await self._fleet.wait_for_state(engine, EngineState.READY, EngineState.DOWN, EngineState.SPARE)
            if engine.state is EngineState.SPARE:
                return None

    async def _first_sign(self) -> str:
        """What has happened to the engine first."""
        waiting = {
            asyncio.ensure_future(self._process.wait()): "its process ended",
            asyncio.ensure_future(self._fleet.wait_for_state(self._engine, EngineState.DOWN)): "it was given up",
            asyncio.ensure_future(
                _until_ill(self._engine, self._health_timeout_s)
            ): "it does not say that it is healthy",
        }
        try:
            ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return next(reason for task, reason in waiting.items() if task in ended)


class FleetTrial:
    """Tries out on the first engine whether versions can be taken up in place; if not, all get them by a new start."""

    def __init__(self, fleet: Fleet, *, head_is_seen: bool) -> None:
        """`head_is_seen`: a head that is not renewed with the embeddings that it is tied to would show."""
        self._fleet = fleet
        self._head_is_seen = head_is_seen
        self._trial = ReloadTrial()

    async def fails(self, engine: Engine, version: Version) -> bool:
        """Whether an engine that was started with a version must be started anew, for it was tried and has failed."""
        weights = ServedWeights(actor_of(version), known_fingerprints(version), self._head_is_seen)
        fault, tried = await self._trial.fault(engine.control, weights)
        if tried and fault is not None:
            log.warning("reload_is_not_exact", engine=engine.number, reason=fault, sentence=_FRESH)
            for each in self._fleet.engines:
                each.restarts = each.starter is not None
        return tried and fault is not None


def _refusal(error: TuneloopError, champion: Version) -> EnvironmentRefused:
    """Why the service cannot start."""
    if isinstance(error, EnvironmentRefused):
        return error
    return EnvironmentRefused(
        f"checkpoint_root_dir: version {champion.version}, which is to be served, cannot be: {error}; restore "
        f"{champion.path} from a copy"
    )


async def _until_ill(engine: Engine, health_timeout_s: float) -> None:
    """Return when a ready engine has failed to say that it is healthy too often; one that is reloaded has time."""
    misses = 0
    while misses < _MISSES:
        await asyncio.sleep(_LOOK_S)
        healthy = await engine.control.healthy(health_timeout_s)
        misses = 0 if healthy or engine.state is not EngineState.READY else misses + 1
