"""Takes up new versions while requests are in flight: verify, then engine by engine pause, load, forget, resume, prove.

When anything fails the engine gets its old weights back and serves on, and the version is rejected with the reason. An
engine that has died is started again by its own supervisor, with the champion.
"""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from pathlib import Path

import structlog

from explorer.fleet import Engine, EngineState, Fleet
from explorer.metrics import Metrics
from shared.checkpoint import ACTOR, Probe, read_manifest
from shared.config import Settings
from shared.errors import CheckpointRejected, CheckpointUnreadable, EngineError, LedgerUnavailable
from shared.ledger import Ledger, Version

log = structlog.get_logger()

#: How often a version may take an engine down with it, or be unreadable, before it is rejected.
_DEATHS, _UNREADABLE = 2, 5


class Reloader:
    """Follows the versions that the trainer registers."""

    def __init__(self, settings: Settings, fleet: Fleet, *, ledger: Ledger, metrics: Metrics) -> None:
        self._interval_s = settings.explorer.service_status_check_interval
        self._drain_first = settings.explorer.on_reload == "wait"
        self._drain_s = settings.explorer.request_timeout
        self._base = settings.model.model_path.absolute()
        self._fleet = fleet
        self._ledger = ledger
        self._metrics = metrics
        self._deaths: Counter[int] = Counter()
        self._unreadable: Counter[int] = Counter()
        self._held: int | None = None
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Look for a new version every `service_status_check_interval` seconds, for ever."""
        while True:
            try:
                await self.turn()
            except LedgerUnavailable as error:
                log.warning("database_away", reason=str(error))
            except Exception:
                log.exception("reload_failed")
            await asyncio.sleep(self._interval_s)

    async def turn(self) -> None:
        """Take up the newest candidate, if there is one; bring engines that missed a turn to the champion.

        While an alarm holds, candidates are left as they are.
        """
        async with self._turn:
            champion = await asyncio.to_thread(self._ledger.champion)
            self._metrics.version_served.set(champion.version)
            candidate = await asyncio.to_thread(self._ledger.candidate)
            ready = any(engine.state is EngineState.READY for engine in self._fleet.engines)
            if candidate is not None and ready and not await self._is_held(candidate):
                await self._take_up(candidate, champion)
            else:
                await self._align(champion)

    async def _is_held(self, candidate: Version) -> bool:
        """Whether an alarm forbids that a new version is served; said once, and once when it is over."""
        held = await asyncio.to_thread(self._ledger.promotion_held)
        if held and self._held is None:
            names = [alarm.name for alarm in await asyncio.to_thread(self._ledger.alarms) if alarm.holds]
            log.warning("promotion_held", version=candidate.version, alarms=names)
        elif not held and self._held is not None:
            log.info("promotion_released", version=candidate.version, held_since_version=self._held)
        self._held = (self._held or candidate.version) if held else None
        return held

    async def _align(self, champion: Version) -> None:
        for engine in self._fleet.engines:
            if engine.state is EngineState.READY and engine.version != champion.version:
                await self._fleet.set(engine, EngineState.RELOADING)
                await self._put_back(engine, champion)

    async def _take_up(self, candidate: Version, champion: Version) -> None:
        try:
            probe = await verified(candidate, self._base)
            for engine in self._fleet.engines:
                if engine.state is EngineState.READY and engine.version != candidate.version:
                    await self._swap(engine, candidate, probe, back_to=champion)
        except CheckpointUnreadable as error:
            log.warning("version_unreadable", version=candidate.version, reason=str(error))
            self._unreadable[candidate.version] += 1
            if self._unreadable[candidate.version] >= _UNREADABLE:
                await self._reject(candidate, str(error))
            return
        except CheckpointRejected as error:
            await self._reject(candidate, str(error))
            await self._align(champion)
            return
        except EngineError as error:
            log.error("engine_lost_in_reload", version=candidate.version, reason=str(error))
            self._deaths[candidate.version] += 1
            if self._deaths[candidate.version] >= _DEATHS:
                await self._reject(candidate, f"engines die of it: {error}")
                await self._align(champion)
            return
        if not any(engine.version == candidate.version for engine in self._fleet.engines):
            return
        await asyncio.to_thread(self._ledger.promote, candidate.version)
        self._metrics.version_served.set(candidate.version)
        for seconds in await asyncio.to_thread(self._ledger.feedback_to_served, candidate.version):
            self._metrics.feedback_to_served.observe(seconds)
        log.info("version_served", version=candidate.version, step=candidate.step)

    async def _swap(self, engine: Engine, version: Version, probe: Probe, *, back_to: Version) -> None:
        await self._fleet.set(engine, EngineState.RELOADING)
        started = time.monotonic()
        if self._drain_first:
            await self._drain(engine)
        try:
            await engine.control.pause("keep")
        except EngineError as error:
            # It has not seen the version yet, so this is none of the version's doing.
            log.error("engine_lost_before_reload", engine=engine.number, version=version.version, reason=str(error))
            await self._fleet.set(engine, EngineState.DOWN)
            return
        try:
            await _load_paused(engine, version, self._fleet)
            await engine.control.prove(probe)
        except (EngineError, CheckpointRejected) as error:
            await self._put_back(engine, back_to)
            if engine.state is EngineState.READY:
                raise CheckpointRejected(str(error)) from error
            raise EngineError(str(error)) from error
        await self._fleet.set(engine, EngineState.READY)
        self._metrics.reload_seconds.observe(time.monotonic() - started)

    async def _put_back(self, engine: Engine, champion: Version) -> None:
        """Load the old weights again; an engine that cannot is marked down, which makes its supervisor restart it."""
        try:
            await load(engine, champion, fleet=self._fleet)
            if champion.version:
                await engine.control.prove(read_manifest(champion.path, sha256=champion.manifest_sha256).probe)
        except (EngineError, CheckpointRejected) as error:
            log.error("engine_not_put_back", engine=engine.number, version=champion.version, reason=str(error))
            await self._fleet.set(engine, EngineState.DOWN)
        else:
            await self._fleet.set(engine, EngineState.READY)

    async def _drain(self, engine: Engine) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._fleet.until_idle(engine), self._drain_s)

    async def _reject(self, version: Version, reason: str) -> None:
        log.error("version_rejected", version=version.version, reason=reason)
        self._metrics.rejected.inc()
        await asyncio.to_thread(self._ledger.reject, version.version, reason)


def actor_of(version: Version) -> Path:
    """The Hugging Face folder of a version; the base model is one itself."""
    return version.path / ACTOR if version.version else version.path


async def load(engine: Engine, version: Version, *, fleet: Fleet) -> None:
    """Swap an engine's weights for a version's, in place, keeping what is in flight."""
    await engine.control.pause("keep")
    await _load_paused(engine, version, fleet)


async def _load_paused(engine: Engine, version: Version, fleet: Fleet) -> None:
    control = engine.control
    await fleet.loading(engine)
    await control.load(actor_of(version))
    await control.forget_prefixes()
    await fleet.loaded(engine, version.version)
    await control.resume()


async def verified(version: Version, base: Path) -> Probe:
    """The probe of a version that a verifier process has found fit to be served. Raises CheckpointRejected."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "explorer.verifier",
        str(version.path),
        version.manifest_sha256 or "",
        str(version.version),
        str(base),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:  # we are told to stop
            process.kill()
            await process.wait()
    if process.returncode == 1:
        raise CheckpointRejected(said.decode(errors="replace"))
    if process.returncode != 0:
        raise CheckpointUnreadable(said.decode(errors="replace") or f"its verifier died ({process.returncode})")
    return read_manifest(version.path, sha256=version.manifest_sha256).probe
