"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    what is in the other folders, with sizes and sha256
      actor/           a Hugging Face folder that any tool can load
      critic/          trainer_state/     what only the trainer reads

This is the only module that knows these names. A folder is visible under its name only when it is complete and on disk;
it is a version only when the ledger says so.
"""

import hashlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from shared.errors import CheckpointRejected

_MANIFEST = "manifest.json"
_STAGING = ".staging-"
_GARBAGE = ".garbage-"


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint: its path below the folder, its size in bytes, its sha256."""

    path: str
    size: int
    sha256: str


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that what was trained is what is served.

    `logprobs[i]` is the trainer's log-probability of `prompt_ids[i + 1]` after the ids before it, at temperature 1. An
    engine with the same weights answers the same within `tolerance` (mean absolute difference, nats).
    """

    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself. `step` counts optimiser steps, `epoch` is the trainer's fencing token."""

    version: int
    parent: int
    step: int
    epoch: int
    base_model: str
    created_at: float
    dtype: str
    probe: Probe
    files: tuple[File, ...] = ()


class CheckpointStore:
    """The checkpoints of one experiment, below `job_dir`."""

    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir

    def path(self, version: int) -> Path:
        """Where `version` lies, or would."""
        return self._root / f"global_step_{version}"

    def stage(self, epoch: int) -> Path:
        """An empty folder to write the next checkpoint into."""
        self._root.mkdir(parents=True, exist_ok=True)
        staging = self._root / f"{_STAGING}{epoch}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        return staging

    def seal(self, staging: Path) -> tuple[File, ...]:
        """Bring every staged file to disk and list them."""
        files = tuple(_sealed(path, staging) for path in sorted(staging.rglob("*")) if path.is_file())
        for folder in (path for path in staging.rglob("*") if path.is_dir()):
            _sync(folder)
        return files

    def publish(self, staging: Path, manifest: Manifest) -> tuple[Path, str]:
        """Put the sealed folder in its place; returns the path and the manifest's sha256.

        A folder of that name that no version claims is moved away: its trainer died before registering it.
        """
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        with (staging / _MANIFEST).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync(staging)
        target = self.path(manifest.version)
        if target.exists():
            self._bin(target)
        staging.rename(target)
        _sync(self._root)
        return target, hashlib.sha256(data).hexdigest()

    def prune(self, keep: Collection[int]) -> list[int]:
        """Delete all versions but `keep`, and what dead trainers left; returns the versions deleted."""
        gone = []
        for path in self._root.glob("global_step_*"):
            number = path.name.removeprefix("global_step_")
            if number.isdigit() and int(number) not in keep:
                self._bin(path)
                gone.append(int(number))
        for path in self._root.glob(f"{_GARBAGE}*"):
            shutil.rmtree(path, ignore_errors=True)
        return sorted(gone)

    def _bin(self, path: Path) -> None:
        """Make `path` invisible in one step, then delete it: a reader never meets half a folder."""
        garbage = path.with_name(f"{_GARBAGE}{path.name}-{os.getpid()}")
        path.rename(garbage)
        shutil.rmtree(garbage, ignore_errors=True)


def read_manifest(path: Path, *, sha256: str | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointRejected if it is not the one that was registered."""
    try:
        data = (path / _MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointRejected(f"{path.name}: its manifest cannot be read: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointRejected(f"{path.name}: its manifest is not the one that was registered")
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointRejected(f"{path.name}: its manifest is damaged: {error}") from None


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless every file is there as the manifest says, below `folder` if given."""
    for file in manifest.files:
        if folder is not None and not file.path.startswith(f"{folder}/"):
            continue
        try:
            found = (path / file.path).stat().st_size
            if found != file.size:
                raise CheckpointRejected(f"{path.name}/{file.path}: {found} bytes, the manifest says {file.size}")
            if _sha256(path / file.path) != file.sha256:
                raise CheckpointRejected(f"{path.name}/{file.path}: its sha256 is not the manifest's")
        except OSError as error:
            raise CheckpointRejected(f"{path.name}/{file.path}: {error.strerror}") from None


def _sealed(path: Path, root: Path) -> File:
    _sync(path)
    return File(path=str(path.relative_to(root)), size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
