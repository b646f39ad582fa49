"""Weights from a checkpoint into an engine: verified first, loaded while it is paused."""

import asyncio
import sys
from pathlib import Path

from tuneloop.explorer.engines.fleet import Engine, Fleet
from tuneloop.shared.checkpoint import ACTOR, CheckpointStore, Probe, read_manifest
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable
from tuneloop.shared.ledger.ledger import Version


def actor_of(version: Version) -> Path:
    """The Hugging Face folder of a version; the base model is one itself."""
    return version.path / ACTOR if version.version else version.path


async def load(engine: Engine, version: Version, *, fleet: Fleet) -> None:
    """Swap an engine's weights for a version's, in place, keeping what is in flight."""
    await engine.control.pause("keep")
    await _load_paused(engine, version, fleet)


async def _load_paused(engine: Engine, version: Version, fleet: Fleet) -> None:
    control = engine.control
    await fleet.begin_load(engine)
    await control.load(actor_of(version))
    await control.reset_prefix_cache()
    await fleet.end_load(engine, version.version)
    await control.resume()


async def verify_in_process(version: Version, base: Path, store: CheckpointStore) -> Probe:
    """The probe of a version that a verifier process has found fit to be served. Raises CheckpointRejected."""
    await asyncio.to_thread(store.check_place, version.path)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "tuneloop.explorer.versions.verifier",
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
    if process.returncode == 1 and said:  # without a reason it is Python that ended so
        raise CheckpointRejected(said.decode(errors="replace"))
    if process.returncode != 0:
        raise CheckpointUnreadable(said.decode(errors="replace") or f"its verifier died ({process.returncode})")
    return read_manifest(version.path, sha256=version.manifest_sha256).probe
