"""Checkpoints on the shared file system: staged, sealed, put in place, verified, pruned.

    {job_dir}/global_step_{version}/
      manifest.json    the weights' files, with sizes and sha256; its own sha256 is registered
      actor/           a Hugging Face folder that any tool can load, or an adapter in peft's format
      trainer_state/   counters and the random generator
      state_manifest.json   critic/ and the optimisers in trainer_state/, which come after the version is registered
      .weights-only    they are deleted, or about to be
    {job_dir}/.staging-{epoch}/           a version's weights in the making
    {job_dir}/.staging-{epoch}-state/     its critic and optimisers in the making
    {job_dir}/.garbage-*/                 what is being deleted

This is the only module that knows these names. A folder is visible under its name only when it is complete and on
disk; it is a version only when the ledger has registered it.

A trainer may stand still anywhere, and wake up when a newer one has taken over. So nothing is ever put in the place of
something else: a name that is taken is left alone, and the next free one is used (global_step_7-1). A name is free
again only once its version is registered, and then nothing uses it. A newer trainer moves the stagings of older epochs
away, in one step, and with them their way to a name.

Room on a file system, computed before it is used: what is to be written, against what is free beyond a reserve.
"""

import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Self

import msgspec

from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable
from tuneloop.shared.held_files import clear_held, make_below

#: What the trainer leaves free: this share of the file system, at most so many bytes. More than the explorer's outbox
#: wants there, so that a checkpoint never stops replies from being kept.
RESERVE_SHARE, RESERVE_BYTES = 0.1, 4 << 30

#: A checkpoint of one model has some thirty files and folders.
_INODES = 64


class DiskSpace(NamedTuple):
    """The file system of `folder`: bytes `needed`, in reserve and free; and inodes."""

    folder: Path
    needed: int
    reserve: int
    free: int
    inodes: int = _INODES

    @property
    def missing(self) -> int:
        """What must be made free before it fits; some byte where inodes are missing."""
        return max(int(self.inodes < _INODES), self.needed + self.reserve - self.free)

    @property
    def sentence(self) -> str:
        if self.inodes < _INODES:
            return f"the file system of {self.folder} has {self.inodes} free inodes (`df -i`): delete files there"
        needed, free, reserve = map(gigabytes, (self.needed, self.free, self.reserve))
        sentence = f"the next checkpoint needs {needed}, {free} are free in {self.folder}, {reserve} of them stay free"
        return f"{sentence}: {gigabytes(self.missing)} are missing" if self.missing else sentence


def measure_space(folder: Path, *, needed: int) -> DiskSpace:
    """The room in `folder`, or in the nearest folder above it that is there. Raises OSError."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    disk = os.statvfs(there)
    reserve = min(int(RESERVE_SHARE * disk.f_blocks * disk.f_frsize), RESERVE_BYTES)
    inodes = disk.f_favail if disk.f_files else _INODES  # some file systems count none
    return DiskSpace(folder, needed, reserve, disk.f_bavail * disk.f_frsize, inodes)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


ACTOR, CRITIC, TRAINER_STATE = "actor", "critic", "trainer_state"

#: What the actor's folder holds where only an adapter is trained; peft's own names.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: The small files of the trainer's state: its counters, and the state of its random generator.
COUNTERS, RANDOM = "state.json", "random.safetensors"

MANIFEST, STATE_MANIFEST = "manifest.json", "state_manifest.json"
_WEIGHTS_ONLY = ".weights-only"
VERSION_PREFIX = "global_step_"
_VERSION_FOLDER = re.compile(rf"{VERSION_PREFIX}(\d+)(?:-\d+)?")
STAGING = ".staging-"
GARBAGE = ".garbage-"


def version_in(name: str) -> int | None:
    found = _VERSION_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def is_marked_weights_only(path: Path) -> bool:
    return (path / _WEIGHTS_ONLY).exists()


def mark_weights_only(path: Path) -> Path:
    """Say that critic and optimiser of the version in `path` are about to be deleted; returns the mark."""
    mark = path / _WEIGHTS_ONLY
    mark.touch()
    return mark


def for_going_on(path: Path) -> list[Path]:
    """What of a version only going on from it to the bit needs, what describes it first."""
    state = [each for each in (path / TRAINER_STATE).glob("*") if each.name not in {COUNTERS, RANDOM}]
    return [each for each in (path / STATE_MANIFEST, path / CRITIC) if each.exists()] + state


def size_without_weights(path: Path) -> int:
    files = (leaf for each in for_going_on(path) for leaf in ([each] if each.is_file() else each.rglob("*")))
    return sum(file.stat().st_size for file in files)


def stays(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return folder == ACTOR or (folder == TRAINER_STATE and rest in {COUNTERS, RANDOM})


def goes(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return folder == CRITIC or (folder == TRAINER_STATE and "/" not in rest and rest not in {COUNTERS, RANDOM})


def leaves(top: Path) -> list[Path]:
    return sorted(path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())


Kind = Literal["full", "lora"]


class File(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: int
    sha256: str


#: Ids of a probe's prompt, where `max_model_len` allows: more than a block of an engine's prefix cache.
PROBE_LENGTH = 272

#: How many ids fewer than `max_model_len` a probe's prompt has at least: an engine goes on from it.
PROBE_ROOM = 32


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Proof: log-probabilities of `prompt_ids[i + 1]` at temperature 1, which engines meet within `tolerance` nats."""

    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


class VerifiedProbe(Probe, frozen=True, kw_only=True):
    """A probe with what the files hold: `fingerprints` by the dtype they are served in, each sum by its part."""

    fingerprints: dict[str, dict[str, int]]

    @classmethod
    def of(cls, probe: Probe, fingerprints: Mapping[str, Mapping[str, int]]) -> Self:
        held = {served: dict(sums) for served, sums in fingerprints.items()}
        return cls(**msgspec.structs.asdict(probe), fingerprints=held)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's description of itself; `kind`: all weights, or an adapter to the base model's."""

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


def seal_file(path: Path, root: Path, mode: int, *, sha256: str | None = None) -> File:
    """Bring a staged file to disk with these rights, and describe it; it is read unless its `sha256` is known."""
    name = str(path.relative_to(root))
    if path.is_symlink():
        raise CheckpointRejected(f"{name}: a checkpoint holds files, not links")
    path.chmod(mode)
    sync_folder(path)
    return File(path=name, size=path.stat().st_size, sha256=sha256 or sha256_of(path))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_READERS = 8


def is_weights_only(path: Path) -> bool:
    """Whether the version in `path` is without critic and optimiser: not written yet, or deleted, or about to be."""
    try:
        return not _state_files(path, read_manifest(path))
    except CheckpointRejected:
        return True


def newest_with_state(places: Mapping[int, Path], *, upto: int) -> int:
    """The newest version up to `upto` that has critic and optimiser, of those in these folders; 0 if none has."""
    versions = sorted((version for version in places if 0 < version <= upto), reverse=True)
    return next((version for version in versions if not is_weights_only(places[version])), 0)


def files_at(path: Path, manifest: Manifest) -> list[File]:
    return [*(file for file in manifest.files if stays(file.path)), *_state_files(path, manifest)]


def check_files(path: Path, manifest: Manifest, *, folder: str | None = None) -> None:
    """Raise CheckpointRejected unless the files are exactly those of the manifests, below `folder` if given."""
    top = path if folder is None else path / folder
    files = files_at(path, manifest)
    wanted = [file for file in files if folder is None or file.path.startswith(f"{folder}/")]
    if not wanted:
        raise CheckpointRejected(f"{top.name} of {path.name}: the manifest names no file of it")
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda file: _read_and_check(path, file), wanted))
    # A loader takes what it finds, so no other file may be there. NFS keeps open files as .nfs*.
    found = {str(leaf.relative_to(path)) for leaf in leaves(top) if not leaf.name.startswith(".")}
    known = {file.path for file in files} | {MANIFEST, STATE_MANIFEST}
    if all(stays(name) for name in known - {MANIFEST, STATE_MANIFEST}):
        # Critic and optimiser that were not all put there when a trainer died, or not all deleted: nothing reads them.
        found = {name for name in found if not goes(name)}
    for extra in sorted(found - known):
        raise CheckpointRejected(f"{path.name}/{extra}: the manifest does not name it")


def _state_files(path: Path, manifest: Manifest) -> tuple[File, ...]:
    if is_marked_weights_only(path):
        return ()
    if (state := read_state_manifest(path)) is not None:
        return state.files
    # Of a release in which one manifest listed everything.
    return tuple(file for file in manifest.files if not stays(file.path))


def _read_and_check(path: Path, file: File) -> None:
    try:
        place = path / file.path
        status = place.lstat()
        if not stat.S_ISREG(status.st_mode) or place.resolve() != path.resolve() / file.path:
            raise CheckpointRejected(
                f"{path.name}/{file.path}: not a file of this folder, but a link or something else"
            )
        if status.st_size != file.size:
            raise CheckpointRejected(f"{path.name}/{file.path}: {status.st_size} bytes, the manifest says {file.size}")
        if sha256_of(place) != file.sha256:
            raise CheckpointRejected(f"{path.name}/{file.path}: its sha256 is not the manifest's")
    except FileNotFoundError as error:
        raise CheckpointRejected(f"{path.name}/{file.path}: {error.strerror}") from None
    except OSError as error:
        raise CheckpointUnreadable(f"{path.name}/{file.path}: {error.strerror}") from None


#: Files that are brought to disk and hashed at once; sha256 of a large model takes a core for seconds.
_SEALERS = 8
_STATE = "-state"
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


class CheckpointStore:
    def __init__(self, job_dir: Path, *, mode: int = 0o600) -> None:
        self._root = job_dir
        self._mode, self._folder_mode = mode, mode | (mode & 0o444) >> 2

    def path(self, version: int) -> Path:
        """The folder of `version`, unless its name was taken."""
        return self._root / f"{VERSION_PREFIX}{version}"

    def check_place(self, path: Path) -> None:
        """Raise CheckpointRejected for a link, CheckpointUnreadable unless `path` is a folder of this experiment's."""
        if path.is_symlink():
            raise CheckpointRejected(f"{path} is a link")
        if path.parent.resolve() != self._root.resolve():
            raise CheckpointUnreadable(
                f"{path} is not a folder of {self._root}: give all services the same checkpoint_root_dir"
            )

    def stage(self, epoch: int, *, state: bool = False) -> Path:
        """An empty folder to write the next checkpoint into; what this epoch left of an earlier one is deleted."""
        make_below(self._root)
        staging = self._root / f"{STAGING}{epoch}{_STATE if state else ''}"
        if staging.exists():
            self._bin(staging)
        staging.mkdir()
        staging.chmod(self._folder_mode)  # A trainer of another user must be able to move it away.
        return staging

    def seal(self, staging: Path, *, digests: Mapping[Path, str] | None = None) -> tuple[File, ...]:
        """Bring every staged file to disk and list them. A link is refused: what it names may change later."""
        known = digests or {}
        with ThreadPoolExecutor(_SEALERS) as pool:
            sealed = pool.map(
                lambda path: seal_file(path, staging, self._mode, sha256=known.get(path)), leaves(staging)
            )
            files = tuple(sealed)
        for folder in (path for path in staging.rglob("*") if path.is_dir()):
            folder.chmod(self._folder_mode)
            sync_folder(folder)
        return files

    def describe(self, staging: Path, manifest: Manifest) -> str:
        sha256 = self._write(staging / MANIFEST, manifest)
        staging.chmod(self._folder_mode)
        sync_folder(staging)
        return sha256

    def publish(self, staging: Path, manifest: Manifest) -> tuple[Path, str]:
        sha256 = self.describe(staging, manifest)
        return self.put(staging, manifest.version), sha256

    def put(self, staging: Path, version: int) -> Path:
        """Give a described folder its name, the first that is free; returns where it is."""
        for number in itertools.count():
            target = self._root / (f"{VERSION_PREFIX}{version}-{number}" if number else f"{VERSION_PREFIX}{version}")
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

    def add_state(self, staging: Path, path: Path, manifest: StateManifest) -> None:
        """Move a sealed folder of critic and optimisers into its version's, the manifest last; OSError if blocked."""
        self._write(staging / STATE_MANIFEST, manifest)
        for name in sorted(each.relative_to(staging) for each in for_going_on(staging)):
            if name != Path(STATE_MANIFEST):
                (staging / name).rename(path / name)
        sync_folder(path / TRAINER_STATE)
        sync_folder(path)
        (staging / STATE_MANIFEST).rename(path / STATE_MANIFEST)
        sync_folder(path)

    def put_aside(self, spared: Collection[Path], *, newest: int) -> Iterator[tuple[Path, Path]]:
        """Make all folders of versions up to `newest` but the `spared` invisible, all of them registered."""
        names = {path.name for path in spared}
        for path in sorted(self._root.glob(f"{VERSION_PREFIX}*")):
            version = version_in(path.name)
            if version is not None and version <= newest and path.name not in names:
                yield path, self._hide(path)

    def delete(self, garbage: Path) -> None:
        shutil.rmtree(garbage, ignore_errors=True)

    def strip(self, path: Path) -> None:
        """Delete a version's critic and optimisers, which only an exact resume needs."""
        ours = version_in(path.name) is not None and path.parent.resolve() == self._root.resolve()
        if not ours or not path.exists() or (is_marked_weights_only(path) and not for_going_on(path)):
            return
        mark_weights_only(path).chmod(self._mode)
        sync_folder(path)  # Should it die in between: what is marked is not loaded, whether it is there or not.
        for each in for_going_on(path):
            self._bin(each)

    def clear(self, epoch: int) -> None:
        """Delete what trainers of epochs before `epoch` were writing, and what was being deleted when one died."""
        for path in self._root.glob(f"{STAGING}*"):
            epoch_of_it = path.name.removeprefix(STAGING).removesuffix(_STATE)
            if epoch_of_it.isdecimal() and int(epoch_of_it) < epoch:
                # Not one of a user who shares nothing: what that publishes gets a name of its own.
                with suppress(PermissionError):
                    self._bin(path)
        for path in self._root.glob(f"{GARBAGE}*"):
            shutil.rmtree(path, ignore_errors=True)
        clear_held(self._root)

    def folders(self) -> list[Path]:
        return sorted(path for path in self._root.glob(f"{VERSION_PREFIX}*") if version_in(path.name) is not None)

    def put_back(self, copy: Path) -> Path:
        """Copy a version's folder to its place, in which it replaces another. No service may run. Raises OSError."""
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

    def _write(self, path: Path, manifest: Manifest | StateManifest) -> str:
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        with path.open("wb") as file:
            os.fchmod(file.fileno(), self._mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest()

    def _let_in(self) -> None:
        """Let who may read the checkpoints into the folder that they are in; no user is kept out of it for that."""
        rights = stat.S_IMODE(self._root.stat().st_mode)
        if rights | self._folder_mode != rights:
            with suppress(PermissionError):  # Another user's folder: its owner decides who may read it.
                self._root.chmod(rights | self._folder_mode)

    def _bin(self, path: Path) -> None:
        """Make `path` invisible in one step, then delete it: a reader never meets half a folder."""
        self.delete(self._hide(path))

    def _hide(self, path: Path) -> Path:
        garbage = Path(tempfile.mkdtemp(prefix=GARBAGE, dir=self._root))
        path.rename(garbage / path.name)
        return garbage
