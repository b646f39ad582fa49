"""Which checkpoints stay, and which keep critic and optimiser; and from which of them training resumes.

Writes critic and optimisers behind a version that is registered, and deletes what is not needed any more.
"""

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
    """Raise EnvironmentRefused unless all files of a registered version are those that were published."""
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
    """The folder of critic and optimiser to resume with, the version's own or the nearest older one's; None without."""
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


#: Versions that are kept only because replies wait that they sampled. Those of older ones cannot be recomputed.
_WAITED_FOR = 8


def prune_by_settings(settings: Settings, store: CheckpointStore, ledger: Ledger, *, writing: int = 0) -> None:
    """Delete what the settings do not keep; the state of version `writing` is about to be written."""
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
    """Delete checkpoints but the last `keep` of each policy, and never one that is served, may be, or is resumed from.

    Of a policy that was deleted none stays, but those that others begin with. `keep` 0 means all of them, as for the
    policies `keep_all`. Those of
    every `keep_interval`-th step stay, too, and what a rollback would go back to, if there is such a version, and what
    would be resumed from after a rollback or a rejection, and the newest _WAITED_FOR of those that `still_sampled` says
    replies wait of, which may have to be recomputed. All keep their weights alone but the one that is resumed from, and
    the newest before it that has critic and optimiser, while it has none, and `writing`. A disk that refuses is no
    reason to stop training.
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
        with versions.hold() as now:  # Meanwhile another decision may have been made.
            spared |= set[int]().union(*map(_must_stay, now))
            places = {each.version: each.path for line in now for each in line.versions if each.version in spared}
            # Versions that begin with the weights of another share its folder.
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
    """What serves, may serve, or is resumed from, now or after a rollback or a rejection."""
    may_serve = {VersionState.CANDIDATE, VersionState.CANARY, VersionState.CHAMPION}
    needed = {each.version for each in registered.versions if each.pinned or each.state in may_serve}
    needed |= {registered.newest, registered.champion_before or 0}
    return needed | {registered.newest_without(version) for version in needed}


#: A writer that is about to be done is waited for, rather than that a state is skipped, where the disk is waited for.
_PATIENCE_S = 0.2


class PublishedVersion(NamedTuple):
    """A registered version: where it is, what its manifest is, after which step it was, and whose it is."""

    version: int
    path: Path
    manifest_sha256: str
    step: int
    policy: int = 0


class StateToWrite(NamedTuple):
    """What is to be written behind a version. `state`: None if the writer is busy, or there is no room.

    `is_live`: the learner's own tensors, which change with its next step.
    """

    state: CapturedState | None
    size: int
    is_live: bool
    measured: Metrics


class StateWriter:
    """One thread, one state at a time: a version that comes while it is busy is published without."""

    def __init__(self, settings: Settings, ledger: Ledger, store: CheckpointStore, *, epoch: int) -> None:
        self._settings, self._ledger, self._store, self._epoch = settings, ledger, store, epoch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._work: Future[None] | None = None
        self._measured: SimpleQueue[tuple[int, Metrics]] = SimpleQueue()
        self._copies = MemoryCopies(snapshot.size_of_state, snapshot.copy_state)
        #: By policy its last version, while that is without a state.
        self._without: dict[int, PublishedVersion] = {}
        #: The version whose state was captured last.
        self._captured: PublishedVersion | None = None
        #: What is written of a version goes first.
        self.priority = DiskPriority()
        #: Whether the last state did not fit on the disk.
        self.full = False
        #: Whether there was no room for one when the last version had been published, and older ones deleted.
        self._has_no_room = False
        #: The bytes of the state that is written now or next, and where it is being written.
        self._pending = 0
        self._staging: Path | None = None

    def prepare(self, learner: Learner) -> None:
        """Begin to make room for the copies of a GPU's state, in the thread: else the first step would wait for it."""
        self._copies.prepare(learner, self._pool)

    def capture(self, learner: Learner, *, patience_s: float = _PATIENCE_S) -> StateToWrite:
        """Take a copy of the state, unless the writer is busy; without room for one, the state itself."""
        size = snapshot.size_of_state(learner)
        obstacle = "behind the last version the disk had no room for one" if self._has_no_room else None
        if self._is_busy(patience_s):
            obstacle = "the one before is still written"
        started, state, is_live = time.perf_counter(), None, False
        if obstacle is not None:
            _log.warning("state_skipped", step=learner.steps, reason=obstacle)
        elif (state := self._copy(learner)) is None and learner.ranks.size == 1:  # Else no process has all of it.
            state, is_live = snapshot.state_of(learner), True
        if state is None:
            return StateToWrite(None, size, is_live=False, measured={"state/skipped": 1.0})
        measured = {"state/skipped": 0.0, "time/publish/copy": time.perf_counter() - started}
        return StateToWrite(state, size, is_live, measured)

    def follow(self, published: PublishedVersion, captured: StateToWrite) -> None:
        """Write what was captured for a version that is registered now, while training goes on, and prune."""
        self._without[published.policy] = published
        if captured.state is None and self._is_busy(0):
            return
        self._pending = captured.size if captured.state is not None else 0
        self._captured = published if captured.state is not None else self._captured
        self._work = self._pool.submit(self._run, published, captured.state, captured.size)
        if captured.is_live:
            self.join()

    def catch_up(self, learner: Learner, version: int) -> None:
        """Before another learner's steps: write the state of `version`, which `learner` is, if that was skipped."""
        last = next((each for each in self._without.values() if each.version == version), None)
        if last is not None and last != self._captured:
            self.join()
            self.follow(last, self.capture(learner))

    def finish(self, learner: Learner | None, version: int, curves: CurveWriter) -> bool:
        """Before `learner`, which is `version`, goes: write its state now, if that was skipped; whether it is there."""
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
        """Before the learner is loaded again: what it was then is not that of any version any more."""
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
        """The bytes that the disk is yet to take of the state that is written now or next."""
        staging, written = self._staging, 0  # the thread may be done with it at any time
        for folder, _, names in os.walk(staging) if staging is not None else ():
            for name in names:
                with suppress(FileNotFoundError):  # It has just been put in its place.
                    written += os.stat(os.path.join(folder, name)).st_size
        return max(0, self._pending - written)

    def close(self) -> None:
        """Let the thread end, after what it is at."""
        self._pool.shutdown()

    def report(self, curves: CurveWriter) -> None:
        """Write what has been measured since the last call."""
        for step, measured in self.drain():
            curves.add(step, measured)

    def drain(self) -> list[tuple[int, Metrics]]:
        """What has been measured since the last call, each with its step."""
        return [self._measured.get() for _ in range(self._measured.qsize())]

    def _copy(self, learner: Learner) -> CapturedState | None:
        state = self._copies.of(learner)
        if state is None:
            event = "state_not_kept" if learner.ranks.size > 1 else "state_written_in_the_foreground"
            _log.warning(event, reason="there is no main memory for a copy of it")
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
        except LedgerError as error:  # The loop meets it in its own verbs.
            _log.warning("prune_failed", reason=str(error))
        if state is not None:
            measured |= self._try(published, state, size)
            self._pending, self._staging = 0, None
        elif self._has_no_room:
            with suppress(OSError):  # The next publication meets it.
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
            with suppress(LedgerError):  # The log has said it; the next state that does not fit says it again.
                self._ledger.alarms.raise_alarm(alarm)
            return {"state/skipped": 1.0}
        except (OSError, SafetensorError) as error:  # A newer trainer has moved it away, or the disk refuses.
            _log.error("state_not_kept", version=published.version, reason=str(error))
            return {"state/skipped": 1.0}
        # Not by its number: one that was not registered has a namesake.
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
    """Whether the disk, or the user's share of it, is full. safetensors has the number in words only."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(f"os error {number})" in str(error) for number in numbers)
