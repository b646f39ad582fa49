"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    what is in the other folders, with sizes and sha256
      actor/           a Hugging Face folder that any tool can load, or an adapter in peft's format
      critic/          trainer_state/     what only the trainer reads; an older version is rid of most of it
      .weights-only    it is
    {job_dir}/.staging-{epoch}/           a checkpoint in the making
    {job_dir}/.garbage-*/                 what is being deleted

This is the only module that knows these names. A folder is visible under its name only when it is complete and on disk;
it is a version only when the ledger has registered it.

A trainer may stand still anywhere, and wake up when a newer one has taken over. So nothing is ever put in the place of
something else: a name that is taken is left alone, and the next free one is used (global_step_7-1). A name is free
again only once its version is registered, and then nobody wants it. A newer trainer moves the stagings of older epochs
away, in one step, and with them their way to a name.
"""

import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, Self

import msgspec

from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable
from tuneloop.shared.held_files import clear_held

ACTOR, CRITIC, TRAINER_STATE = "actor", "critic", "trainer_state"

#: What the actor's folder holds where only an adapter is trained; peft's own names.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: The small files of the trainer's state: its counters, and the state of its random generator.
COUNTERS, RANDOM = "state.json", "random.safetensors"

_MANIFEST = "manifest.json"
_WEIGHTS_ONLY = ".weights-only"
#: Files that are brought to disk and hashed at once; sha256 of a large model takes a core for seconds.
_SEALERS = 8
_VERSION = "global_step_"
_VERSION_FOLDER = re.compile(rf"{_VERSION}(\d+)(?:-\d+)?")
#: What a rename onto a folder that is not empty is refused with.
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
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


class CheckpointStore:
    """The checkpoints of one experiment, below `job_dir`.

    Their files have the rights `mode`, whatever the process's umask; folders can be entered by who may read.
    """

    def __init__(self, job_dir: Path, *, mode: int = 0o600) -> None:
        self._root = job_dir
        self._mode, self._folder_mode = mode, mode | (mode & 0o444) >> 2

    def path(self, version: int) -> Path:
        """Where `version` lies, unless something was in its way."""
        return self._root / f"{_VERSION}{version}"

    def check_place(self, path: Path) -> None:
        """Raise CheckpointRejected unless `path` is a folder of this experiment's, and no link to another one."""
        if path.is_symlink() or path.parent.resolve() != self._root.resolve():
            raise CheckpointRejected(f"{path} is not a folder of {self._root}, or is a link")

    def stage(self, epoch: int) -> Path:
        """An empty folder to write the next checkpoint into; what this epoch left of an earlier one is deleted."""
        self._root.mkdir(parents=True, exist_ok=True)
        staging = self._root / f"{_STAGING}{epoch}"
        if staging.exists():
            self._bin(staging)
        staging.mkdir()
        staging.chmod(self._folder_mode)  # A trainer of another user must be able to move it away.
        return staging

    def seal(self, staging: Path) -> tuple[File, ...]:
        """Bring every staged file to disk and list them. A link is refused: what it names may change later."""
        with ThreadPoolExecutor(_SEALERS) as pool:
            files = tuple(pool.map(lambda path: _seal_file(path, staging, self._mode), _leaves(staging)))
        for folder in (path for path in staging.rglob("*") if path.is_dir()):
            folder.chmod(self._folder_mode)
            sync_folder(folder)
        return files

    def describe(self, staging: Path, manifest: Manifest) -> str:
        """Write the manifest into a sealed folder, and bring it to disk; returns its sha256."""
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        with (staging / _MANIFEST).open("wb") as file:
            os.fchmod(file.fileno(), self._mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staging.chmod(self._folder_mode)
        sync_folder(staging)
        return hashlib.sha256(data).hexdigest()

    def publish(self, staging: Path, manifest: Manifest) -> tuple[Path, str]:
        """Describe a sealed folder and put it in its place; returns the path and the manifest's sha256."""
        sha256 = self.describe(staging, manifest)
        return self.put(staging, manifest.version), sha256

    def put(self, staging: Path, version: int) -> Path:
        """Give a described folder its name, the first that is free; returns where it is.

        What has the name already is left alone: it may be the checkpoint of a newer trainer.
        """
        for number in itertools.count():
            target = self._root / (f"{_VERSION}{version}-{number}" if number else f"{_VERSION}{version}")
            try:
                staging.rename(target)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            else:
                self._let_in()
                sync_folder(self._root)
                return target
        raise AssertionError("there is always a free name")

    def prune(self, spared: Collection[Path], *, newest: int) -> list[Path]:
        """Delete all folders of versions up to `newest` but the `spared`, all of them registered; returns the deleted.

        What comes after `newest` may be a checkpoint that a newer trainer is just registering.
        """
        names = {path.name for path in spared}
        deleted = []
        for path in sorted(self._root.glob(f"{_VERSION}*")):
            version = _version_in(path.name)
            if version is not None and version <= newest and path.name not in names:
                self._bin(path)
                deleted.append(path)
        return deleted

    def strip(self, path: Path) -> None:
        """Delete of a version's folder what only going on from it to the bit needs: critic and optimiser.

        A folder that is not one of these checkpoints is left alone.
        """
        ours = _version_in(path.name) is not None and path.parent.resolve() == self._root.resolve()
        if not ours or not path.exists() or _is_stripped(path):
            return
        (path / _WEIGHTS_ONLY).touch()
        (path / _WEIGHTS_ONLY).chmod(self._mode)
        sync_folder(path)  # Should it die in between: what is marked is not loaded, whether it is there or not.
        for each in _for_going_on(path):
            self._bin(each)

    def clear(self, epoch: int) -> None:
        """Delete what trainers of epochs before `epoch` were writing, and what was being deleted when one died.

        One of them that is still at it finds nothing any more that it could give a name.
        """
        for path in self._root.glob(f"{_STAGING}*"):
            epoch_of_it = path.name.removeprefix(_STAGING)
            if epoch_of_it.isdecimal() and int(epoch_of_it) < epoch:
                # Not one of a user who shares nothing: what that publishes gets a name of its own.
                with suppress(PermissionError):
                    self._bin(path)
        for path in self._root.glob(f"{_GARBAGE}*"):
            shutil.rmtree(path, ignore_errors=True)
        clear_held(self._root)

    def folders(self) -> list[Path]:
        """The folders of versions, registered or not."""
        return sorted(path for path in self._root.glob(f"{_VERSION}*") if _version_in(path.name) is not None)

    def put_back(self, copy: Path) -> Path:
        """Copy a version's folder that lies elsewhere to its place, under the same name; what is there goes.

        No service may run. Raises OSError.
        """
        staging, target = self.stage(0), self._root / copy.name
        shutil.copytree(copy, staging, dirs_exist_ok=True, copy_function=shutil.copyfile)
        self.seal(staging)
        staging.chmod(self._folder_mode)
        if target.exists():
            self._bin(target)
        staging.rename(target)
        self._let_in()
        sync_folder(self._root)
        return target

    def _let_in(self) -> None:
        """Let who may read the checkpoints into the folder that they are in; nobody is kept out of it for that."""
        rights = stat.S_IMODE(self._root.stat().st_mode)
        if rights | self._folder_mode != rights:
            with suppress(PermissionError):  # Another user's folder: it is theirs to let in whom they like.
                self._root.chmod(rights | self._folder_mode)

    def _bin(self, path: Path) -> None:
        """Make `path` invisible in one step, then delete it: a reader never meets half a folder."""
        garbage = Path(tempfile.mkdtemp(prefix=_GARBAGE, dir=self._root))
        path.rename(garbage / path.name)
        shutil.rmtree(garbage, ignore_errors=True)


def read_manifest(path: Path, *, sha256: str | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointRejected if it is not the one that was registered."""
    if path.is_symlink():
        raise CheckpointRejected(f"{path.name}: a link, whose target may change; a checkpoint is a folder")
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
    if _version_in(path.name) != manifest.version:
        raise CheckpointRejected(f"{path.name}: its manifest is that of version {manifest.version}")
    for file in manifest.files:
        if not _is_below(file.path):
            raise CheckpointRejected(
                f"{path.name}: its manifest names {file.path!r}, which is no path below the folder"
            )
    return manifest


def size_of(manifest: Manifest) -> int:
    """Bytes of all its files."""
    return sum(file.size for file in manifest.files)


def size_without_weights(path: Path) -> int:
    """Bytes that `CheckpointStore.strip` would make free."""
    files = (leaf for each in _for_going_on(path) for leaf in ([each] if each.is_file() else each.rglob("*")))
    return sum(file.stat().st_size for file in files)


def is_weights_only(path: Path) -> bool:
    """Whether critic and optimiser of the version in `path` are deleted, or about to be."""
    return (path / _WEIGHTS_ONLY).exists()


def _is_stripped(path: Path) -> bool:
    return is_weights_only(path) and not _for_going_on(path)


def _for_going_on(path: Path) -> list[Path]:
    """What of a version only going on from it to the bit needs."""
    state = [each for each in (path / TRAINER_STATE).glob("*") if each.name not in {COUNTERS, RANDOM}]
    return [path / CRITIC, *state] if (path / CRITIC).exists() else state


def files_at(path: Path, manifest: Manifest) -> list[File]:
    """The files of the manifest that must be in the folder: those that an older version is rid of need not be."""
    return [file for file in manifest.files if not is_weights_only(path) or _stays(file.path)]


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless the files are exactly those of the manifest, below `folder` if given.

    Those that an older version is rid of need not be there.
    """
    top = path if folder is None else path / folder
    wanted = [file for file in files_at(path, manifest) if folder is None or file.path.startswith(f"{folder}/")]
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


def _version_in(name: str) -> int | None:
    """The version whose folder has this name, if it is one's."""
    found = _VERSION_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def _stays(name: str) -> bool:
    """Whether an older version keeps this file."""
    folder, _, rest = name.partition("/")
    return folder == ACTOR or (folder == TRAINER_STATE and rest in {COUNTERS, RANDOM})


def _leaves(top: Path) -> list[Path]:
    """Everything below `top` that is not a folder, links to folders included."""
    return sorted(path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return name == str(path) and name != "." and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _seal_file(path: Path, root: Path, mode: int) -> File:
    name = str(path.relative_to(root))
    if path.is_symlink():
        raise CheckpointRejected(f"{name}: a checkpoint holds files, not links")
    path.chmod(mode)
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
