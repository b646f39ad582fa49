"""Weights from a checkpoint into an engine: verified first, loaded while it is paused."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from tuneloop.explorer.engines.adapter_names import is_adapter
from tuneloop.explorer.engines.fleet import Engine, EngineState, Fleet
from tuneloop.shared.checkpoints import ACTOR, Probe, VerifiedProbe, read_manifest, version_in
from tuneloop.shared.errors import (
    CheckpointRejected,
    CheckpointUnreadable,
    EngineError,
    LedgerError,
    LedgerUnavailable,
    VersionRefused,
)
from tuneloop.shared.job_marks import folder_mark
from tuneloop.shared.ledger.ledger import Alarm, Ledger, Version
from tuneloop.shared.ledger.versions.versions import Versions
from tuneloop.shared.process_time import cpu_seconds
from tuneloop.shared.settings.settings import Settings

log = structlog.get_logger()

DAMAGED = "champion_damaged"

#: The alarm while an explorer cannot read a version that it is to serve.
UNREADABLE = "version_unreadable"

#: How long a verifier may take, in seconds, and how many bytes of the base model it gets one more second for. A disk
#: that is slower than that is as good as away. One that computes nothing at all for `_STILL_S` is killed before.
_VERIFIER_S, _BYTES_A_S, _STILL_S = 60.0, 20e6, 30.0

#: How often a verifier is looked at, and how long it is waited for once it is killed: one that hangs in a disk stays.
_LOOK_S, _END_S = 1.0, 2.0

_NO_ROOM = (
    "no engine runs beside the others: versions are loaded by one engine after the other, and requests wait if there "
    "is but one. Give it room, or write explorer.rollout_model.spare_place: false"
)
_Key = TypeVar("_Key")
_Found = TypeVar("_Found")

#: Raises EngineError or CheckpointRejected unless an engine is what it should be.
Prove = Callable[[Engine], Awaitable[None]]

#: By dtype.
Fingerprints = Mapping[str, Mapping[str, int]]

#: Of how many versions what is known is remembered.
_REMEMBERED = 16

#: What the verifier found in versions: reading one again for a proof takes as long as loading.
_FINGERPRINTS: dict[Path, Fingerprints] = {}

#: The same of base models, which are read again once their files have changed: names, sizes and times.
_OF_BASES: dict[Path, tuple[object, Fingerprints]] = {}


class Verifier(NamedTuple):
    """What versions are verified against, by which `explorer`, and for how long at most."""

    base: Path
    job_dir: Path
    limit_s: float = _VERIFIER_S
    explorer: str = ""

    @classmethod
    def of(cls, settings: Settings) -> "Verifier":
        base = settings.model.model_path.absolute()
        size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
        return cls(base, settings.job_dir, _VERIFIER_S + size / _BYTES_A_S, settings.explorer_name)

    @property
    def about(self) -> str:
        return f"{socket.gethostname()}: {self.job_dir}: "


def actor_of(version: Version) -> Path:
    """The Hugging Face folder of a version; the base model is one itself."""
    return version.path if version.is_base else version.path / ACTOR


class KnownProbes:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[int, tuple[Version, Probe]] = {}
        self._describing = asyncio.Lock()

    async def of(self, engine: Engine) -> tuple[Version, Probe]:
        number = engine.version
        async with self._describing:
            if (known := _lookup(self._known, number)) is None:
                version = await asyncio.to_thread(self._ledger.versions.get, number)
                if version is None:
                    raise LedgerError(f"version {number} is unknown")
                known = version, await _probe_of(version, engine)
                self._keep(known)
            return known

    async def prove(self, engine: Engine, version: Version) -> None:
        """Raise CheckpointRejected unless an engine has a version's weights, as far as these are known by anything."""
        known = _lookup(self._known, version.version)
        if known is None and not version.is_base:
            known = version, await _probe_of(version, engine)
            self._keep(known)
        if known is not None:
            await engine.control.prove(known[1])

    def _keep(self, known: tuple[Version, Probe]) -> None:
        self._known[known[0].version] = known
        if len(self._known) > _REMEMBERED:
            # What the base model is known by cannot be found out again, once an engine may have other weights.
            del self._known[next(number for number in self._known if number)]


def _lookup(known: dict[_Key, _Found], key: _Key) -> _Found | None:
    """The cached value of a key, which becomes the most recently used."""
    if (found := known.pop(key, None)) is not None:
        known[key] = found
    return found


async def _probe_of(version: Version, engine: Engine) -> Probe:
    if version.is_base:
        return _with_fingerprints(version, await engine.control.create_probe())
    manifest = await asyncio.to_thread(read_manifest, version.path, sha256=version.manifest_sha256)
    return _with_fingerprints(version, manifest.probe)


async def load(engine: Engine, version: Version, *, fleet: Fleet) -> None:
    """Swap an engine's weights for a version's: in place, keeping what is in flight, or by starting it again."""
    if not engine.restarts:
        await engine.control.pause("keep")
    await load_paused(engine, version, fleet)


async def load_paused(engine: Engine, version: Version, fleet: Fleet) -> None:
    control = engine.control
    await fleet.begin_load(engine)
    if engine.restarts:
        assert engine.starter is not None
        await engine.starter.start_anew(actor_of(version))
        return await fleet.end_load(engine, version.version)
    started = time.monotonic()
    await control.load(actor_of(version))
    await control.reset_prefix_cache()
    await fleet.end_load(engine, version.version)
    await control.resume()
    seconds = round(time.monotonic() - started, 3)
    log.info("version_loaded", version=version.version, engine=engine.number, seconds=seconds)


class Replacements:
    def __init__(self, fleet: Fleet, probes: KnownProbes, *, drain: Callable[[Engine], Awaitable[None]]) -> None:
        """`drain` waits until an engine has ended what it has in flight, as far as that is waited for."""
        self._fleet = fleet
        self._probes = probes
        self._drain = drain

    def room_beside(self, engine: Engine) -> Engine | None:
        """Where an engine can be started that takes an engine's place; None if it is reloaded where it is."""
        places = [each for each in self._fleet.engines if each.state is EngineState.SPARE and each.starter]
        free = (each for each in places if each.starter and each.starter.has_room())
        return next(free, None) if engine.restarts else None

    async def replace(self, engine: Engine, version: Version, *, prove: Prove, back_to: Version) -> bool:
        """Whether another engine has taken an engine's place, which has answered until then.

        Raises CheckpointRejected if the version is not what it should be, or if no engine runs with it where one does
        with the version `back_to`. If that does not run there either, there is no room, and the place is closed.
        """
        if (place := self.room_beside(engine)) is None:
            return False
        try:
            await self._start(place, version, prove)
        except EngineError as error:
            log.error("replacement_failed", engine=place.number, version=version.version, reason=str(error))
            if not await self._runs_in(place, back_to):
                return False
            await self._vacate(place)
            raise CheckpointRejected(f"no engine runs with it: {error}") from error
        await self._take_over(engine, place)
        return True

    async def follow(self, engine: Engine, champion: Version) -> bool:
        """Whether another engine with the champion has taken an engine's place."""
        place = self.room_beside(engine)
        if place is None or not await self._runs_in(place, champion):
            return False
        await self._take_over(engine, place)
        return True

    async def _runs_in(self, place: Engine, version: Version) -> bool:
        """Whether an engine runs now in a spare place with a version that is right; else it is a place no more."""

        async def prove(engine: Engine) -> None:
            await self._probes.prove(engine, version)

        try:
            await self._start(place, version, prove)
        except (EngineError, CheckpointRejected) as error:
            log.warning("no_surge_capacity", engine=place.number, reason=str(error), sentence=_NO_ROOM)
            place.starter = None
            return False
        return True

    async def _start(self, place: Engine, version: Version, prove: Prove) -> None:
        """Start an engine in a spare place, and prove it; else the place is spare again. Raises EngineError."""
        place.restarts = True
        await self._fleet.set_state(place, EngineState.STARTING)
        try:
            await load_paused(place, version, self._fleet)
            await prove(place)
        except BaseException:
            await self._vacate(place)
            raise

    async def _take_over(self, engine: Engine, replacement: Engine) -> None:
        """Let another engine answer in an engine's stead, which ends what it has in flight, and then itself."""
        await self._fleet.set_state(replacement, EngineState.READY)
        await self._fleet.set_state(engine, EngineState.RELOADING)
        await self._drain(engine)
        await self._vacate(engine)

    async def _vacate(self, engine: Engine) -> None:
        assert engine.starter is not None
        await engine.starter.stop()
        await self._fleet.end_load(engine, 0)
        await self._fleet.set_state(engine, EngineState.SPARE)


async def verify_in_process(version: Version, verifier: Verifier) -> VerifiedProbe:
    """The probe of a version that a verifier process has found fit. Raises CheckpointRejected, CheckpointUnreadable."""
    started = time.monotonic()
    await _verify(version, verifier)
    log.info("version_verified", version=version.version, seconds=round(time.monotonic() - started, 3))
    manifest = await asyncio.to_thread(read_manifest, version.path, sha256=version.manifest_sha256)
    return _with_fingerprints(version, manifest.probe)


async def verify_wanted(version: Version, verifier: Verifier, ledger: Ledger) -> VerifiedProbe:
    """The same of a version that is to be served, with an alarm while its files cannot be read from here."""
    try:
        probe = await verify_in_process(version, verifier)
    except CheckpointUnreadable as error:
        log.warning("version_unreadable", version=version.version, reason=str(error))
        ways_out = f"bring {version.path} back, or `tuneloop versions promote` another version"
        await tell_unreadable(f"version {version.version} cannot be read: {error}; {ways_out}", verifier, ledger)
        raise
    await tell_unreadable(None, verifier, ledger)
    return probe


async def tell_unreadable(reason: str | None, verifier: Verifier, ledger: Ledger) -> None:
    """Raise or clear this explorer's alarm about versions that cannot be read, if the database can be written to."""

    def tell() -> None:
        ledger.alarms.keep_own(UNREADABLE, reason, about=verifier.about, opened=ledger.alarms.all())

    with suppress(LedgerUnavailable):
        await asyncio.to_thread(tell)


async def is_away(version: Version, verifier: Verifier, ledger: Ledger, error: Exception) -> bool:
    """Whether what went wrong with a version says nothing about it, because its files cannot be read from here."""
    try:
        if not isinstance(error, CheckpointUnreadable):
            await verify_wanted(version, verifier, ledger)
    except CheckpointRejected as found:
        error = found
    return isinstance(error, CheckpointUnreadable)


def known_fingerprints(version: Version) -> Fingerprints:
    """What a version's files hold, as the verifier found it; empty where they have no fingerprint."""
    return _OF_BASES.get(version.path, (None, {}))[1] if version.is_base else _lookup(_FINGERPRINTS, version.path) or {}


def _with_fingerprints(version: Version, probe: Probe) -> VerifiedProbe:
    return VerifiedProbe.of(probe, known_fingerprints(version))


class VerifierProcess:
    def __init__(self) -> None:
        """Raises OSError."""
        command = (sys.executable, "-P", "-m", "tuneloop.explorer.versions.verifier")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.arguments: Sequence[str] = ()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def communicate(self) -> tuple[bytes, None]:
        said, _ = await asyncio.to_thread(self._process.communicate, json.dumps(self.arguments).encode())
        return said, None

    def kill(self) -> None:
        self._process.kill()

    def cpu_s(self) -> float:
        return cpu_seconds(self._process.pid)

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.wait)


#: The process that the next version is verified by: to start one and import numpy takes as long as to read an adapter.
_AHEAD: list[VerifierProcess] = []


#: Verifiers that were killed and have not ended: no other is started to hang at the same disk.
_HANGING: list[VerifierProcess] = []


async def start_verifier(*arguments: str) -> VerifierProcess:
    """A verifier's process, the one that has been started ahead if it still waits. Raises OSError."""
    process = _AHEAD.pop() if _AHEAD else await asyncio.to_thread(VerifierProcess)
    if process.returncode is not None:
        await process.communicate()  # That closes its pipes.
        process = await asyncio.to_thread(VerifierProcess)
    process.arguments = arguments
    return process


async def start_verifier_ahead() -> None:
    with suppress(OSError):
        if not _AHEAD:
            _AHEAD.append(await asyncio.to_thread(VerifierProcess))


async def _verify(version: Version, verifier: Verifier) -> None:
    """Remember what a version's files hold. Raises CheckpointRejected, or CheckpointUnreadable."""
    if version.is_base:
        await _read_base(version.path, verifier)
        return
    place = str(verifier.job_dir)
    found = await _read(verifier, version.path, version.manifest_sha256 or "", version_in(version.path.name), place)
    if await asyncio.to_thread(is_adapter, actor_of(version)):
        below = await _read_base(verifier.base, verifier)
        found = {dtype: {**below[dtype], **parts} for dtype, parts in found.items() if dtype in below}
    _FINGERPRINTS.pop(version.path, None)
    _FINGERPRINTS[version.path] = found
    if len(_FINGERPRINTS) > _REMEMBERED:
        del _FINGERPRINTS[next(iter(_FINGERPRINTS))]


async def _read_base(base: Path, verifier: Verifier) -> Fingerprints:
    """What a base model's files hold, each time that they have changed. Raises CheckpointUnreadable."""
    try:
        stamp = await asyncio.to_thread(_stamp_of, base)
    except OSError as error:
        raise CheckpointUnreadable(f"the base model in {base} cannot be read: {error}") from None
    if base not in _OF_BASES or _OF_BASES[base][0] != stamp:
        _OF_BASES[base] = stamp, await _read(verifier, base, "", None)
    return _OF_BASES[base][1]


def _stamp_of(base: Path) -> object:
    status = ((each.name, each.stat()) for each in base.iterdir() if each.suffix in {".json", ".safetensors"})
    return sorted((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in status)


async def _read(verifier: Verifier, path: Path, sha256: str, version: int | None, *place: str) -> Fingerprints:
    """What a verifier's process finds in a folder. The base model lies where its owner has put it, in no `place`."""
    named = (str(path), sha256, str(version or 0), str(verifier.base), *place)
    _HANGING[:] = [each for each in _HANGING if each.returncode is None]
    if _HANGING:
        raise CheckpointUnreadable("an earlier verifier was killed and has not ended: a disk holds it")
    try:
        process = await start_verifier(*named)
    except OSError as error:  # no room for a process, or for its pipe
        raise CheckpointUnreadable(f"its verifier cannot be started: {error}") from error
    reading = asyncio.ensure_future(process.communicate())
    began, moved_at, spent = time.monotonic(), time.monotonic(), 0.0
    try:
        while not (await asyncio.wait([reading], timeout=_LOOK_S))[0]:
            now, computed = time.monotonic(), process.cpu_s()
            spent, moved_at = (computed, now) if computed != spent else (spent, moved_at)
            if now - began >= verifier.limit_s:
                raise CheckpointUnreadable(f"its verifier did not end within {verifier.limit_s:.0f} s, and was killed")
            if now - moved_at >= _STILL_S:
                raise CheckpointUnreadable(f"its verifier stood still for {_STILL_S:.0f} s, and was killed")
        output, _ = await reading
    finally:
        reading.cancel()
        if process.returncode is None:
            process.kill()
            _HANGING.append(process)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
    if process.returncode == 1 and output:  # without a reason it is Python that ended so
        raise CheckpointRejected(output.decode(errors="replace"))
    if process.returncode != 0:
        raise CheckpointUnreadable(output.decode(errors="replace") or f"its verifier died ({process.returncode})")
    found: Fingerprints = json.loads(output)
    return found


async def servable_champion(
    ledger: Ledger, verifier: Verifier, line: Versions | None = None
) -> tuple[Version, VerifiedProbe | None]:
    """The champion, of the default policy or of another's line, whose files have been verified, and its probe.

    The probe is None for the base model.

    Where the champion's files are damaged, the last champion whose files are whole becomes the champion again. Raises
    CheckpointRejected if there is none, CheckpointUnreadable if the champion's files cannot be read from here or are
    damaged here alone, and LedgerUnavailable if the decision cannot be written down.
    """
    line = line or ledger.versions
    while True:
        champion = await asyncio.to_thread(line.champion)
        if champion.is_base:
            with suppress(CheckpointRejected):  # an engine that cannot read it either says so better
                await _read_base(champion.path, verifier)
            return champion, None
        try:
            return champion, await verify_wanted(champion, verifier, ledger)
        except CheckpointUnreadable:
            raise
        except CheckpointRejected as error:
            if not await _replace(champion, line, ledger, verifier, reason=str(error)):
                raise


async def _replace(champion: Version, line: Versions, ledger: Ledger, verifier: Verifier, *, reason: str) -> bool:
    """Whether there is another champion now. Raises CheckpointUnreadable where it may be damaged here alone."""
    log.error("champion_damaged", version=champion.version, reason=reason)
    running = [each for each in await asyncio.to_thread(ledger.explorers.running) if each.name != verifier.explorer]
    if serving := [each.name for each in running if each.version == champion.version]:
        damaged = f"version {champion.version} is damaged as this explorer reads it, and {', '.join(serving)} serves it"
        cure = f"compare {champion.path} on both machines"
        await tell_unreadable(f"{damaged}: {reason}; {cure}", verifier, ledger)
        raise CheckpointUnreadable(f"{damaged}: {reason}")
    for number in await asyncio.to_thread(line.champions_before):
        version = await asyncio.to_thread(ledger.versions.get, number)
        if version is None or not await asyncio.to_thread(os.path.exists, version.path):  # Such as one that was pruned.
            continue
        try:
            await _verify(version, verifier)
        except CheckpointRejected as error:
            if isinstance(error, CheckpointUnreadable) and folder_mark(verifier.job_dir) is None:
                raise
            log.warning("version_damaged", version=version.version, reason=str(error))
            continue
        damaged = f"version {champion.version}, the champion, is damaged: {reason}"
        with suppress(VersionRefused):  # another supervisor, or an administrator, was faster
            await asyncio.to_thread(line.stand_in, number, instead_of=champion.version, reason=damaged)
            log.warning("champion_replaced", version=number, instead_of=champion.version)
            alarm = Alarm(DAMAGED, f"{damaged}; version {number} answers in its place", version=champion.version)
            await asyncio.to_thread(ledger.alarms.raise_alarm, alarm)
        return True
    return False
