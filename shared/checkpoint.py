"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    what is in the other folders, with sizes and sha256
      actor/           a Hugging Face folder that any tool can load, or an adapter in peft's format
      critic/          trainer_state/     what only the trainer reads

This is the only module that knows these names. A folder is visible under its name only when it is complete and on disk;
it is a version only when the ledger has registered it.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable

ACTOR, CRITIC, TRAINER_STATE = "actor", "critic", "trainer_state"

#: What the actor's folder holds where only an adapter is trained; peft's own names.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MANIFEST = "manifest.json"
#: Files that are brought to disk and hashed at once; sha256 of a large model takes a core for seconds.
_SEALERS = 8
_VERSION = "global_step_"
_STAGING = ".staging-"
_GARBAGE = ".garbage-"


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


class CheckpointStore:
    """The checkpoints of one experiment, below `job_dir`."""

    def __init__(self, job_dir: Path) -> None:
        self._root = job_dir

    def path(self, version: int) -> Path:
        """Where `version` lies, or would."""
        return self._root / f"{_VERSION}{version}"

    def stage(self, epoch: int) -> Path:
        """An empty folder to write the next checkpoint into; leftovers of this epoch or an older one are deleted."""
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob(f"{_STAGING}*"):
            epoch_of_it = leftover.name.removeprefix(_STAGING)
            if epoch_of_it.isdecimal() and int(epoch_of_it) <= epoch:
                shutil.rmtree(leftover, ignore_errors=True)
        staging = self._root / f"{_STAGING}{epoch}"
        staging.mkdir()
        return staging

    def seal(self, staging: Path) -> tuple[File, ...]:
        """Bring every staged file to disk and list them. A link is refused: what it names may change later."""
        with ThreadPoolExecutor(_SEALERS) as pool:
            files = tuple(pool.map(lambda path: _seal_file(path, staging), _leaves(staging)))
        for folder in (path for path in staging.rglob("*") if path.is_dir()):
            sync_folder(folder)
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
        sync_folder(staging)
        target = self.path(manifest.version)
        if target.exists():
            self._bin(target)
        staging.rename(target)
        sync_folder(self._root)
        return target, hashlib.sha256(data).hexdigest()

    def prune(self, keep: Collection[int]) -> list[int]:
        """Delete all versions but `keep`, and what dead trainers left; returns the versions deleted."""
        deleted = []
        for path in self._root.glob(f"{_VERSION}*"):
            number = path.name.removeprefix(_VERSION)
            if number.isdecimal() and int(number) not in keep:
                self._bin(path)
                deleted.append(int(number))
        for path in self._root.glob(f"{_GARBAGE}*"):
            shutil.rmtree(path, ignore_errors=True)
        return sorted(deleted)

    def _bin(self, path: Path) -> None:
        """Make `path` invisible in one step, then delete it: a reader never meets half a folder."""
        garbage = Path(tempfile.mkdtemp(prefix=_GARBAGE, dir=self._root))
        path.rename(garbage / path.name)
        shutil.rmtree(garbage, ignore_errors=True)


def read_manifest(path: Path, *, sha256: str | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointRejected if it is not the one that was registered."""
    try:
        data = (path / _MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(f"{path.name}: its manifest cannot be read: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointRejected(f"{path.name}: its manifest is not the one that was registered")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointRejected(f"{path.name}: its manifest is damaged: {error}") from None
    if path.name != f"{_VERSION}{manifest.version}":
        raise CheckpointRejected(f"{path.name}: its manifest is that of version {manifest.version}")
    for file in manifest.files:
        if not _is_below(file.path):
            raise CheckpointRejected(
                f"{path.name}: its manifest names {file.path!r}, which is no path below the folder"
            )
    return manifest


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless the files are exactly those of the manifest, below `folder` if given."""
    top = path if folder is None else path / folder
    wanted = [file for file in manifest.files if folder is None or file.path.startswith(f"{folder}/")]
    if not wanted:
        raise CheckpointRejected(f"{top.name} of {path.name}: the manifest names no file of it")
    for file in wanted:
        try:
            _check(path, file)
        except OSError as error:
            raise CheckpointUnreadable(f"{path.name}/{file.path}: {error.strerror}") from None
    # A loader takes what it finds, so no other file may be there. NFS keeps open files as .nfs*.
    found = {str(leaf.relative_to(path)) for leaf in _leaves(top) if not leaf.name.startswith(".")}
    for extra in sorted(found - {file.path for file in manifest.files} - {_MANIFEST}):
        raise CheckpointRejected(f"{path.name}/{extra}: the manifest does not name it")


def _check(path: Path, file: File) -> None:
    place = path / file.path
    status = place.lstat()
    if not stat.S_ISREG(status.st_mode) or place.resolve() != path.resolve() / file.path:
        raise CheckpointRejected(f"{path.name}/{file.path}: not a file of this folder, but a link or something else")
    if status.st_size != file.size:
        raise CheckpointRejected(f"{path.name}/{file.path}: {status.st_size} bytes, the manifest says {file.size}")
    if _sha256(place) != file.sha256:
        raise CheckpointRejected(f"{path.name}/{file.path}: its sha256 is not the manifest's")


def _leaves(top: Path) -> list[Path]:
    """Everything below `top` that is not a folder, links to folders included."""
    return sorted(path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return name == str(path) and name != "." and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _seal_file(path: Path, root: Path) -> File:
    name = str(path.relative_to(root))
    if path.is_symlink():
        raise CheckpointRejected(f"{name}: a checkpoint holds files, not links")
    sync_folder(path)
    return File(path=name, size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Bring a folder's names to disk (or a file's bytes)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
