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
from shared.checkpoint import Probe, read_manifest
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
        """Take up the newest candidate, if there is one; bring engines that missed a turn to the champion."""
        async with self._turn:
            champion = await asyncio.to_thread(self._ledger.champion)
            self._metrics.version_served.set(champion.version)
            candidate = await asyncio.to_thread(self._ledger.candidate)
            if candidate is not None and any(engine.state is EngineState.READY for engine in self._fleet.engines):
                await self._take_up(candidate, champion)
            else:
                await self._align(champion)

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
        try:
            if self._drain_first:
                await self._drain(engine)
            await load(engine, version)
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
            await load(engine, champion)
            if champion.version:
                await engine.control.prove(read_manifest(champion.path, sha256=champion.manifest_sha256).probe)
        except (EngineError, CheckpointRejected) as error:
            log.error("engine_not_put_back", engine=engine.number, version=champion.version, reason=str(error))
            await self._fleet.set(engine, EngineState.DOWN)
        else:
            await self._fleet.set(engine, EngineState.READY)

    async def _drain(self, engine: Engine) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.idle.wait(), self._drain_s)

    async def _reject(self, version: Version, reason: str) -> None:
        log.error("version_rejected", version=version.version, reason=reason)
        self._metrics.rejected.inc()
        await asyncio.to_thread(self._ledger.reject, version.version, reason)


def actor_of(version: Version) -> Path:
    """The Hugging Face folder of a version; the base model is one itself."""
    return version.path / "actor" if version.version else version.path


async def load(engine: Engine, version: Version) -> None:
    """Swap an engine's weights for a version's, in place, keeping what is in flight."""
    control = engine.control
    await control.pause("keep")
    engine.loads += 1
    await control.load(actor_of(version))
    await control.forget_prefixes()
    engine.version = version.version
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
