"""Writes critic and optimisers of registered versions, prunes checkpoints, and finds the state to resume from."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import structlog
from safetensors import SafetensorError

from tuneloop.shared.checkpoints import (
    CheckpointStore,
    StateManifest,
    check_files,
    is_weights_only,
    measure_space,
    newest_with_state,
    read_manifest,
)
from tuneloop.shared.errors import CheckpointRejected, DiskFull, EnvironmentRefused, LedgerError
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger, Version
from tuneloop.shared.ledger.versions.alarms import Alarm
from tuneloop.shared.ledger.versions.versions import SERVABLE, Versions, VersionsNow
from tuneloop.shared.operations.diagnosis import DISK_FULL
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.trackers import CurveWriter
from tuneloop.trainer.batches.batch import Metrics
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import MemoryCopies
from tuneloop.trainer.checkpoints.snapshot import CapturedState, DiskPriority
from tuneloop.trainer.learner import Learner

_log = structlog.get_logger()


def require_weights(version: Version, store: CheckpointStore) -> None:
    """Raise EnvironmentRefused unless all files of a registered version match its manifest."""
    try:
        _check(version, store)
    except CheckpointRejected as error:
        serves = version.state in {VersionState.CANARY, VersionState.CHAMPION}
        raise EnvironmentRefused(
            f"checkpoint_root_dir: the newest version is damaged, {version.path.parent}/{error}; restore that folder, "
            f"or give it up: tuneloop versions {'rollback' if serves else 'reject'} {version.version} --reason "
            "damaged; then start again"
        ) from error


def find_state(version: Version, versions: Versions, store: CheckpointStore) -> Path | None:
    """The folder of critic and optimisers to resume with: the version's, the newest older one, or None."""
    if version.begins:
        return None
    if not is_weights_only(version.path):
        _log.info("state_resumed_from", version=version.version, behind=0)
        return version.path
    older = {
        each.version: each
        for each in versions.now().versions
        if each.version < version.version and each.state in SERVABLE and not each.begins
    }
    while older:
        newest = newest_with_state({number: each.path for number, each in older.items()}, upto=version.version)
        if not newest:
            return None
        found = older.pop(newest)
        try:
            _check(found, store)
        except CheckpointRejected as error:
            _log.warning("state_not_resumed", version=newest, reason=str(error))
            continue
        _log.warning("state_resumed_from", version=newest, behind=version.step - found.step)
        return found.path
    return None


def _check(version: Version, store: CheckpointStore) -> None:
    store.check_place(version.path)
    check_files(version.path, read_manifest(version.path, sha256=version.manifest_sha256))


#: Versions kept only because waiting replies were sampled by them; those of older ones cannot be recomputed.
_WAITED_FOR = 8


def prune_by_settings(settings: Settings, store: CheckpointStore, ledger: Ledger, *, writing: int = 0) -> None:
    """Prune by the settings; the state of version `writing` is about to be written."""
    keeps, all_captured = settings.trainer, settings.explorer.capture.logprobs == "all"
    prune(
        store,
        ledger.versions,
        keep=keeps.max_checkpoints_to_keep,
        keep_interval=keeps.keep_interval,
        writing=writing,
        still_sampled=None if all_captured else ledger.training.versions_waiting,
        keep_all=ledger.training.policies_of_jobs(),
    )


def prune(
    store: CheckpointStore,
    versions: Versions,
    *,
    keep: int,
    keep_interval: int | None = None,
    writing: int = 0,
    still_sampled: Callable[[Collection[int]], list[int]] | None = None,
    keep_all: Collection[int] = (),
) -> None:
    """Delete checkpoints except the last `keep` per policy and all that are or may be served, or are resumed from.

    A deleted policy keeps none but those that other policies start from. `keep` 0 keeps all, as for policies in
    `keep_all`. Also kept: each `keep_interval`-th step; the target of a rollback or rejection; the newest _WAITED_FOR
    versions that `still_sampled` returns, for recomputation. Only the version to resume from keeps critic and
    optimisers, the newest before it while it has none, and `writing`. A disk error does not stop training.
    """
    spared, resumed, newest = set[int](), {writing}, 0
    for seen in versions.lines():
        numbers = [each.version for each in seen.versions]
        newest = max(newest, numbers[-1])
        milestones = {each.version for each in seen.versions if keep_interval and each.step % keep_interval == 0}
        are_all = not keep or seen.versions[-1].policy in keep_all
        kept = {*_must_stay(seen), *(numbers if are_all else numbers[-keep:]), *milestones}
        if still_sampled is not None:
            others = [each.version for each in seen.versions if each.version not in kept and each.path.exists()]
            kept |= set(sorted(still_sampled(others))[-_WAITED_FOR:])
        resumable = {each.version: each.path for each in seen.versions if each.state in SERVABLE and not each.begins}
        with_state = newest_with_state(resumable, upto=seen.newest)
        spared |= kept | {with_state}
        resumed.add(with_state)
    aside: dict[Path, Path] = {}
    try:
        with versions.hold() as now:  # a decision may have come meanwhile
            spared |= set[int]().union(*map(_must_stay, now))
            places = {each.version: each.path for line in now for each in line.versions if each.version in spared}
            # Versions that start from another's weights share its folder.
            aside.update(store.put_aside(places.values(), newest=newest))
        begun = {each.version for line in now for each in line.versions if each.begins}
        resumed |= {line.newest for line in now} - begun
        with_states = {places[version] for version in resumed & places.keys()}
        for place in {*places.values()} - with_states:
            store.strip(place)
    except OSError as error:
        _log.warning("prune_failed", reason=str(error))
    finally:
        for folder, garbage in aside.items():
            store.delete(garbage)
            _log.info("version_pruned", folder=folder.name)


def _must_stay(registered: VersionsNow) -> set[int]:
    """Versions that serve, may serve, or are resumed from, now or after a rollback or rejection."""
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered.versions if each.pinned or each.state in may_serve}
    needed |= {registered.newest, registered.champion_before or 0}
    return needed | {registered.newest_without(version) for version in needed}


_PATIENCE_S = 0.2  # seconds to wait for a writer that is almost done, instead of skipping a state


class PublishedVersion(NamedTuple):
    """A version in its place: folder, manifest, step and policy."""

    version: int
    path: Path
    manifest_sha256: str
    step: int
    policy: int = 0


class StateToWrite(NamedTuple):
    """A state to write after a version (None: no room, or busy); `is_live`: the learner's tensors, not a copy."""

    state: CapturedState | None
    size: int
    is_live: bool
    measured: Metrics


class StateWriter:
    """Writes one state at a time in a thread; a version published meanwhile has no state."""

    def __init__(self, settings: Settings, ledger: Ledger, store: CheckpointStore, *, epoch: int) -> None:
        self._settings, self._ledger, self._store, self._epoch = settings, ledger, store, epoch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._work: Future[None] | None = None
        self._measured: SimpleQueue[tuple[int, Metrics]] = SimpleQueue()
        self._copies = MemoryCopies(snapshot.size_of_state, snapshot.copy_state)
        self._without: dict[int, PublishedVersion] = {}  # last version by policy, while it has no state
        self._captured: PublishedVersion | None = None  # the version of the last captured state
        self.priority = DiskPriority()  # lets writing a version go first
        self.full = False  # whether the last state did not fit on the disk
        self._has_no_room = False  # whether the disk had no room for a state after the last publication and pruning
        self._pending = 0  # bytes of the current or next state
        self._staging: Path | None = None

    def prepare(self, learner: Learner) -> None:
        """Reserve memory for copies of a GPU's state in the thread, so that the first step does not wait."""
        self._copies.prepare(learner, self._pool)

    def capture(self, learner: Learner, *, patience_s: float = _PATIENCE_S) -> StateToWrite:
        """Copy the state unless the writer is busy; without memory for a copy, use the state itself."""
        size = snapshot.size_of_state(learner)
        obstacle = "the disk had no room for one after the last version" if self._has_no_room else None
        if self._is_busy(patience_s):
            obstacle = "the previous one is still being written"
        started, state, is_live = time.perf_counter(), None, False
        if obstacle is not None:
            _log.warning("state_skipped", step=learner.steps, reason=obstacle)
        elif (state := self._copy(learner)) is None and learner.ranks.size == 1:  # otherwise no process has all of it
            state, is_live = snapshot.state_of(learner), True
        if state is None:
            return StateToWrite(None, size, is_live=False, measured={"state/skipped": 1.0})
        measured = {"state/skipped": 0.0, "time/publish/copy": time.perf_counter() - started}
        return StateToWrite(state, size, is_live, measured)

    def follow(self, published: PublishedVersion, captured: StateToWrite) -> None:
        """Write the captured state of a registered version while training continues, and prune."""
        self._without[published.policy] = published
        if captured.state is None and self._is_busy(0):
            return
        self._pending = captured.size if captured.state is not None else 0
        self._captured = published if captured.state is not None else self._captured
        self._work = self._pool.submit(self._run, published, captured.state, captured.size)
        if captured.is_live:
            self.join()

    def catch_up(self, learner: Learner, version: int) -> None:
        """Write the skipped state of `version`, which `learner` is, before another learner trains."""
        last = next((each for each in self._without.values() if each.version == version), None)
        if last is not None and last != self._captured:
            self.join()
            self.follow(last, self.capture(learner))

    def finish(self, learner: Learner | None, version: int, curves: CurveWriter) -> bool:
        """Write the skipped state of `version`, which `learner` is, before it is released; whether it has a state."""
        self.join()
        last = next((each for each in self._without.values() if each.version == version), None)
        if learner and last is not None:
            size = snapshot.size_of_state(learner)
            state = snapshot.state_of(learner) if learner.ranks.size == 1 else self._copy(learner)
            if state is not None:
                self._run(last, state, size)
        self.report(curves)
        return last is None or last.policy not in self._without

    def settle(self, curves: CurveWriter, *, policy: int = 0) -> None:
        """Before the learner is reloaded: drop its pending state, which no longer matches a version."""
        self.join()
        self.report(curves)
        self._without.pop(policy, None)

    def join(self) -> None:
        """Wait until nothing is being written or deleted."""
        if self._work is not None:
            self._work.result()
            self._work = None

    @property
    def unwritten(self) -> int:
        """Bytes of the current or next state that the disk still has to take."""
        staging, written = self._staging, 0  # the thread may finish at any time
        for folder, _, names in os.walk(staging) if staging is not None else ():
            for name in names:
                with suppress(FileNotFoundError):  # just moved to its place
                    written += os.stat(os.path.join(folder, name)).st_size
        return max(0, self._pending - written)

    def close(self) -> None:
        self._pool.shutdown()

    def report(self, curves: CurveWriter) -> None:
        for step, measured in self.drain():
            curves.add(step, measured)

    def drain(self) -> list[tuple[int, Metrics]]:
        return [self._measured.get() for _ in range(self._measured.qsize())]

    def _copy(self, learner: Learner) -> CapturedState | None:
        state = self._copies.of(learner)
        if state is None:
            event = "state_not_kept" if learner.ranks.size > 1 else "state_written_in_the_foreground"
            _log.warning(event, reason="main memory has no room for a copy")
        return state

    def _is_busy(self, patience_s: float) -> bool:
        if self._work is None:
            return False
        if not wait_for([self._work], patience_s).done:
            return True
        self.join()
        return False

    def _run(self, published: PublishedVersion, state: CapturedState | None, size: int = 0) -> None:
        started, measured = time.perf_counter(), {}
        try:
            prune_by_settings(self._settings, self._store, self._ledger, writing=published.version)
            measured["time/publish/prune"] = time.perf_counter() - started
        except LedgerError as error:  # the loop meets it too
            _log.warning("prune_failed", reason=str(error))
        if state is not None:
            measured |= self._try(published, state, size)
            self._pending, self._staging = 0, None
        elif self._has_no_room:
            with suppress(OSError):  # the next publication meets it
                self._has_no_room = measure_space(self._settings.job_dir, needed=size).missing > 0
        self._measured.put((published.step, measured))

    def _try(self, published: PublishedVersion, state: CapturedState, size: int) -> Metrics:
        started = time.perf_counter()
        self._copies.wait()
        try:
            self._write(published, state, size)
        except DiskFull as error:
            self.full = self._has_no_room = True
            reason = f"critic and optimiser of version {published.version} are not kept: {error}"
            alarm = Alarm(name=DISK_FULL, reason=reason, step=published.step)
            _log.error("state_not_kept", reason=alarm.reason)
            with suppress(LedgerError):  # it is logged; the next full disk repeats it
                self._ledger.alarms.raise_alarm(alarm)
            return {"state/skipped": 1.0}
        except (OSError, SafetensorError) as error:  # a newer trainer moved it, or the disk failed
            _log.error("state_not_kept", version=published.version, reason=str(error))
            return {"state/skipped": 1.0}
        # Not by its number: an unregistered version may share it.
        if self._without.get(published.policy) == published:
            del self._without[published.policy]
        self.full = False
        took = time.perf_counter() - started
        _log.info("state_kept", version=published.version, step=published.step, seconds=round(took, 3))
        return {"time/publish/state": took}

    def _write(self, published: PublishedVersion, state: CapturedState, size: int) -> None:
        space = measure_space(self._settings.job_dir, needed=size)
        if space.missing:
            raise DiskFull(space.sentence)
        staging = self._staging = self._store.stage(self._epoch, state=True)
        try:
            base = self._settings.model.model_path
            digests = snapshot.save_state(state, staging, base=base, priority=self.priority)
            files = self._store.seal(staging, digests=digests)
            manifest = StateManifest(
                version=published.version, epoch=self._epoch, manifest_sha256=published.manifest_sha256, files=files
            )
            self._store.add_state(staging, published.path, manifest)
        except (OSError, SafetensorError) as error:
            if is_full(error):
                raise DiskFull(f"{error}; {space.sentence}") from error
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def is_full(error: Exception) -> bool:
    """Whether the disk or the quota is full. safetensors has the error number only in its message."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(f"os error {number})" in str(error) for number in numbers)
