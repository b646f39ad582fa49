"""A checkpoint's description of itself: what it is, its files, and the proof that it is served as it was trained."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Literal, Self

import msgspec

from tuneloop.shared.checkpoints.layout import MANIFEST, STATE_MANIFEST, version_in
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable

Kind = Literal["full", "lora"]


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint: its path below the folder, its size in bytes, its sha256."""

    path: str
    size: int
    sha256: str


#: Ids of a probe's prompt, where `max_model_len` allows: more than a block of an engine's prefix cache.
PROBE_LENGTH = 272

#: How many ids fewer than `max_model_len` a probe's prompt has at least: an engine goes on from it.
PROBE_ROOM = 32


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that what was trained is what is served.

    `logprobs[i]` is the trainer's log-probability of `prompt_ids[i + 1]` after the ids before it, at temperature 1. An
    engine with the same weights answers the same within `tolerance` (mean absolute difference, nats).
    """

    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


class VerifiedProbe(Probe, frozen=True, kw_only=True):
    """A probe with what the files hold: `fingerprints` by the dtype they are served in, each sum by its part.

    Empty where they are not known to be what an engine holds.
    """

    fingerprints: dict[str, dict[str, int]]

    @classmethod
    def of(cls, probe: Probe, fingerprints: Mapping[str, Mapping[str, int]]) -> Self:
        """A probe, with these fingerprints."""
        held = {served: dict(sums) for served, sums in fingerprints.items()}
        return cls(**msgspec.structs.asdict(probe), fingerprints=held)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's description of itself. `step` counts optimiser steps, `epoch` is the trainer's fencing token.

    `kind`: whether the actor is all weights, or an adapter to the base model's.
    """

    version: int
    parent: int
    step: int
    epoch: int
    base_model: str
    created_at: float
    dtype: str
    probe: Probe
    files: tuple[File, ...] = ()
    kind: Kind = "full"


class StateManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What lists critic and optimisers of a version whose own manifest has this sha256."""

    version: int
    epoch: int
    manifest_sha256: str
    files: tuple[File, ...] = ()


def read_manifest(path: Path, *, sha256: str | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointRejected if it is not the one that was registered."""
    try:
        if path.is_symlink():
            raise CheckpointRejected(f"{path.name}: a link, whose target may change; a checkpoint is a folder")
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(f"{path.name}: its manifest cannot be read: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointRejected(f"{path.name}: its manifest is not the one that was registered")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointRejected(f"{path.name}: its manifest is damaged: {error}") from None
    if version_in(path.name) != manifest.version:
        raise CheckpointRejected(f"{path.name}: its manifest is that of version {manifest.version}")
    _require_below(path, manifest.files)
    return manifest


def read_state_manifest(path: Path) -> StateManifest | None:
    """What lists critic and optimisers of the version in `path`; None if nothing does. Raises CheckpointRejected."""
    try:
        data, registered = (path / STATE_MANIFEST).read_bytes(), (path / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(data, type=StateManifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointUnreadable(f"{path.name}: its state cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointRejected(f"{path.name}: the manifest of its state is damaged: {error}") from None
    if manifest.manifest_sha256 != hashlib.sha256(registered).hexdigest():
        raise CheckpointRejected(f"{path.name}: its state is that of other weights")
    _require_below(path, manifest.files)
    return manifest


def _require_below(path: Path, files: tuple[File, ...]) -> None:
    for file in files:
        path_in, name = PurePosixPath(file.path), file.path
        if name != str(path_in) or name == "." or "\0" in name or path_in.is_absolute() or ".." in path_in.parts:
            raise CheckpointRejected(
                f"{path.name}: its manifest names {file.path!r}, which is not a path below the folder"
            )
