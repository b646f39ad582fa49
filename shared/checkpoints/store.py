"""Puts checkpoints in their place, and takes them away."""

import errno
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from tuneloop.shared.checkpoints.layout import (
    GARBAGE,
    MANIFEST,
    STAGING,
    STATE_MANIFEST,
    TRAINER_STATE,
    VERSION_PREFIX,
    for_going_on,
    is_marked_weights_only,
    leaves,
    mark_weights_only,
    version_in,
)
from tuneloop.shared.checkpoints.manifest import File, Manifest, StateManifest
from tuneloop.shared.checkpoints.sealing import seal_file, sync_folder
from tuneloop.shared.errors import CheckpointRejected, CheckpointUnreadable
from tuneloop.shared.held_files import clear_held

#: Files that are brought to disk and hashed at once; sha256 of a large model takes a core for seconds.
_SEALERS = 8
_STATE = "-state"
#: What a rename onto a folder that is not empty is refused with.
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


class CheckpointStore:
    """The checkpoints of one experiment, below `job_dir`.

    Their files have the rights `mode`, whatever the process's umask; folders can be entered by who may read.
    """

    def __init__(self, job_dir: Path, *, mode: int = 0o600) -> None:
        self._root = job_dir
        self._mode, self._folder_mode = mode, mode | (mode & 0o444) >> 2

    def path(self, version: int) -> Path:
        """Where `version` lies, unless something was in its way."""
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
        """An empty folder to write the next checkpoint into; what this epoch left of an earlier one is deleted.

        With `state` it is for critic and optimiser of a version that is there already.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        staging = self._root / f"{STAGING}{epoch}{_STATE if state else ''}"
        if staging.exists():
            self._bin(staging)
        staging.mkdir()
        staging.chmod(self._folder_mode)  # A trainer of another user must be able to move it away.
        return staging

    def seal(self, staging: Path, *, digests: Mapping[Path, str] | None = None) -> tuple[File, ...]:
        """Bring every staged file to disk and list them. A link is refused: what it names may change later.

        Those whose sha256 is in `digests` are not read again.
        """
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
        """Write the manifest into a sealed folder, and bring it to disk; returns its sha256."""
        sha256 = self._write(staging / MANIFEST, manifest)
        staging.chmod(self._folder_mode)
        sync_folder(staging)
        return sha256

    def publish(self, staging: Path, manifest: Manifest) -> tuple[Path, str]:
        """Describe a sealed folder and put it in its place; returns the path and the manifest's sha256."""
        sha256 = self.describe(staging, manifest)
        return self.put(staging, manifest.version), sha256

    def put(self, staging: Path, version: int) -> Path:
        """Give a described folder its name, the first that is free; returns where it is.

        What has the name already is left alone: it may be the checkpoint of a newer trainer.
        """
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
        """Put a sealed folder of critic and optimisers into that of their version, the manifest last.

        Raises OSError where it cannot: somebody has moved either folder away, or something is in the way.
        """
        self._write(staging / STATE_MANIFEST, manifest)
        for name in sorted(each.relative_to(staging) for each in for_going_on(staging)):
            if name != Path(STATE_MANIFEST):
                (staging / name).rename(path / name)
        sync_folder(path / TRAINER_STATE)
        sync_folder(path)
        (staging / STATE_MANIFEST).rename(path / STATE_MANIFEST)
        sync_folder(path)

    def put_aside(self, spared: Collection[Path], *, newest: int) -> Iterator[tuple[Path, Path]]:
        """Make all folders of versions up to `newest` but the `spared` invisible, all of them registered.

        One after the other; with each where it is now, for `delete`. What comes after `newest` may be a checkpoint that
        a newer trainer is just registering.
        """
        names = {path.name for path in spared}
        for path in sorted(self._root.glob(f"{VERSION_PREFIX}*")):
            version = version_in(path.name)
            if version is not None and version <= newest and path.name not in names:
                yield path, self._hide(path)

    def delete(self, garbage: Path) -> None:
        """Delete what was put aside."""
        shutil.rmtree(garbage, ignore_errors=True)

    def strip(self, path: Path) -> None:
        """Delete of a version's folder what only going on from it to the bit needs: critic and optimiser.

        A folder that is not one of these checkpoints is left alone.
        """
        ours = version_in(path.name) is not None and path.parent.resolve() == self._root.resolve()
        if not ours or not path.exists() or (is_marked_weights_only(path) and not for_going_on(path)):
            return
        mark_weights_only(path).chmod(self._mode)
        sync_folder(path)  # Should it die in between: what is marked is not loaded, whether it is there or not.
        for each in for_going_on(path):
            self._bin(each)

    def clear(self, epoch: int) -> None:
        """Delete what trainers of epochs before `epoch` were writing, and what was being deleted when one died.

        One of them that is still at it finds nothing any more that it could give a name.
        """
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
        """The folders of versions, registered or not."""
        return sorted(path for path in self._root.glob(f"{VERSION_PREFIX}*") if version_in(path.name) is not None)

    def put_back(self, copy: Path, *, copied: Callable[[int], object] = lambda count: None) -> Path:
        """Copy a version's folder that lies elsewhere to its place, under the same name; what is there goes.

        `copied` is called with the bytes of each file. No service may run. Raises OSError.
        """
        staging, target = self.stage(0), self._root / copy.name

        def copy_file(source: str, destination: str) -> None:
            shutil.copyfile(source, destination)
            copied(os.path.getsize(destination))

        shutil.copytree(copy, staging, dirs_exist_ok=True, copy_function=copy_file)
        self.seal(staging)
        staging.chmod(self._folder_mode)
        if target.exists():
            self._bin(target)
        staging.rename(target)
        self._let_in()
        sync_folder(self._root)
        return target

    def _write(self, path: Path, manifest: Manifest | StateManifest) -> str:
        """Write a manifest, and bring it to disk; returns its sha256."""
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        with path.open("wb") as file:
            os.fchmod(file.fileno(), self._mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(data).hexdigest()

    def _let_in(self) -> None:
        """Let who may read the checkpoints into the folder that they are in; nobody is kept out of it for that."""
        rights = stat.S_IMODE(self._root.stat().st_mode)
        if rights | self._folder_mode != rights:
            with suppress(PermissionError):  # Another user's folder: it is theirs to let in whom they like.
                self._root.chmod(rights | self._folder_mode)

    def _bin(self, path: Path) -> None:
        """Make `path` invisible in one step, then delete it: a reader never meets half a folder."""
        self.delete(self._hide(path))

    def _hide(self, path: Path) -> Path:
        garbage = Path(tempfile.mkdtemp(prefix=GARBAGE, dir=self._root))
        path.rename(garbage / path.name)
        return garbage
