"""Critic and optimiser follow behind a version's weights; without them training goes on with those of an older one."""

import errno
import hashlib
import threading
from contextlib import closing
from threading import Event

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from tests.moving_folder import moving
from tests.trainer.factories import commit, moments_of, points, sample
from tuneloop.shared.checkpoints import (
    CheckpointStore,
    DiskSpace,
    StateManifest,
    check_files,
    files_at,
    is_weights_only,
    read_manifest,
    read_state_manifest,
)
from tuneloop.shared.errors import CheckpointRejected, LedgerUnavailable
from tuneloop.shared.ledger.training.training import Training
from tuneloop.shared.tensorboard import Curves
from tuneloop.trainer.checkpoints import resumption, snapshot
from tuneloop.trainer.checkpoints.resumption import PublishedVersion, StateWriter, find_state, prune
from tuneloop.trainer.loop import TrainingLoop, run

pytestmark = pytest.mark.contract


@pytest.fixture
def trained(settings, ledger):
    """Two versions in bfloat16, each of one step."""
    chosen = settings(trainer={"total_steps": 2, "dtype": "bfloat16"})
    commit(ledger, [sample(i) for i in range(16)])
    run(chosen, Event())
    return chosen


class _StateDiskFull(CheckpointStore):
    def seal(self, staging, *, digests=None):
        if staging.name.endswith("-state"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().seal(staging, digests=digests)


class _Overtaken(CheckpointStore):
    """A newer trainer comes while the state is written."""

    def seal(self, staging, *, digests=None):
        files = super().seal(staging, digests=digests)
        self.clear(99)
        return files


class _Slow(CheckpointStore):
    def __init__(self, folder):
        super().__init__(folder)
        self.go = threading.Event()

    def seal(self, staging, *, digests=None):
        assert self.go.wait(60)
        return super().seal(staging, digests=digests)


def _without_state(path):
    """As a trainer leaves it that dies when it has put the critic there, and no more."""
    (path / "state_manifest.json").unlink()
    for each in (path / "trainer_state").glob("*[rc].safetensors"):
        each.unlink()


def _published(settings, ledger, version=2):
    row = ledger.versions.get(version)
    return PublishedVersion(version, row.path, row.manifest_sha256, row.step)


def test_what_is_registered_is_weights_and_counters_and_the_state_has_a_manifest_of_its_own(trained, ledger):
    newest = ledger.versions.newest()
    manifest, state = read_manifest(newest.path, sha256=newest.manifest_sha256), read_state_manifest(newest.path)
    assert all(
        each.path.startswith(("actor/", "trainer_state/state.json", "trainer_state/random")) for each in manifest.files
    )
    assert {each.path.partition("/")[0] for each in state.files} == {"critic", "trainer_state"}
    assert state.manifest_sha256 == newest.manifest_sha256
    for file in files_at(newest.path, manifest):
        assert hashlib.sha256((newest.path / file.path).read_bytes()).hexdigest() == file.sha256
    (newest.path / "critic" / "more.safetensors").touch()
    with pytest.raises(CheckpointRejected, match="does not name it"):
        check_files(newest.path, manifest)


def test_a_state_of_other_weights_is_refused(trained, ledger):
    newest = ledger.versions.newest()
    state = msgspec.structs.replace(read_state_manifest(newest.path), manifest_sha256="0" * 64)
    (newest.path / "state_manifest.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(CheckpointRejected, match="that of other weights"):
        check_files(newest.path, read_manifest(newest.path))


def test_after_a_death_before_the_state_the_newest_weights_and_older_moments_are_gone_on_with(trained, ledger):
    first, second = ledger.versions.get(1), ledger.versions.get(2)
    _without_state(second.path)
    check_files(second.path, read_manifest(second.path, sha256=second.manifest_sha256))
    assert is_weights_only(second.path)
    state = find_state(second, ledger.versions, CheckpointStore(trained.job_dir))
    assert state == first.path
    learner = snapshot.resume(trained, second.path, state)
    served = load_file(second.path / "actor" / "model.safetensors")
    assert all(
        torch.equal(each, served[name]) for name, each in learner.actor.network.state_dict().items() if name in served
    )
    older = load_file(first.path / "trainer_state" / "actor.safetensors")
    moments = moments_of(learner.optimizers["actor"])
    assert moments
    assert all(torch.equal(each, older[name]) for name, each in moments.items())
    assert {name: each.updates for name, each in learner.optimizers.items()} == {"actor": 4, "critic": 2}
    run(trained.model_copy(update={"trainer": trained.trainer.model_copy(update={"total_steps": 3})}), Event())
    third = ledger.versions.newest()
    assert (third.version, third.step, read_manifest(third.path).parent) == (3, 3, 2)
    assert ledger.reports.imbalance() == []


def test_the_newest_state_stays_until_a_newer_version_has_one(trained, ledger):
    first, second = ledger.versions.get(1), ledger.versions.get(2)
    _without_state(second.path)
    store = CheckpointStore(trained.job_dir)
    prune(store, ledger.versions, keep=5)
    assert not is_weights_only(first.path)
    writer = StateWriter(trained, ledger, store, epoch=7)
    (second.path / "critic").rename(second.path.with_name("aside"))
    writer.follow(_published(trained, ledger), writer.capture(snapshot.resume(trained, second.path, first.path)))
    writer.join()
    assert not is_weights_only(second.path)
    prune(store, ledger.versions, keep=5)
    assert is_weights_only(first.path)
    writer.close()


def test_a_disk_without_room_for_the_state_keeps_the_version_and_raises_an_alarm(trained, ledger):
    second = ledger.versions.get(2)
    _without_state(second.path)
    store = _StateDiskFull(trained.job_dir)
    writer = StateWriter(trained, ledger, store, epoch=7)
    writer.follow(_published(trained, ledger), writer.capture(snapshot.resume(trained, second.path, None)))
    writer.join()
    [alarm] = ledger.alarms.all()
    assert alarm.name == "disk_full"
    assert "critic and optimiser of version 2 are not kept" in alarm.reason
    assert writer.full
    assert writer.drain()[0][1]["state/skipped"] == 1
    assert not list(trained.job_dir.glob(".staging*"))
    writer.close()


def test_once_a_state_had_no_room_none_is_copied_until_there_is_room_behind_a_version(trained, ledger, monkeypatch):
    second, missing = ledger.versions.get(2), [1]
    _without_state(second.path)
    (second.path / "critic").rename(second.path.with_name("aside"))

    def measured(folder, *, needed):
        return DiskSpace(folder, needed, reserve=0, free=needed - missing[0])

    monkeypatch.setattr(resumption, "measure_space", measured)
    writer = StateWriter(trained, ledger, CheckpointStore(trained.job_dir), epoch=7)
    learner = snapshot.resume(trained, second.path, None)

    def publish():
        captured = writer.capture(learner)
        writer.follow(_published(trained, ledger), captured)
        writer.join()
        return captured.state is not None

    assert publish(), "before it is known what is deleted behind the version, nobody knows that it does not fit"
    with capture_logs() as logs:
        assert [publish(), publish()] == [False, False]
    assert [each["event"] for each in logs] == ["state_skipped"] * 2
    missing[0] = 0
    assert not publish()
    assert writer.full, "none has been written yet"
    assert publish()
    assert not writer.full
    assert read_state_manifest(second.path).version == 2
    assert [told["state/skipped"] for _, told in writer.drain() if "state/skipped" in told] == [1]
    writer.close()


def test_a_thread_that_is_overtaken_changes_nothing(trained, ledger):
    second = ledger.versions.get(2)
    _without_state(second.path)
    writer = StateWriter(trained, ledger, _Overtaken(trained.job_dir), epoch=7)
    writer.follow(_published(trained, ledger), writer.capture(snapshot.resume(trained, second.path, None)))
    writer.join()
    assert is_weights_only(second.path)
    assert writer.drain()[0][1]["state/skipped"] == 1
    writer.close()


def test_a_state_that_comes_too_early_is_skipped_and_written_at_a_clean_stop(trained, ledger, tmp_path):
    first, second = ledger.versions.get(1), ledger.versions.get(2)
    for each in (first, second):
        _without_state(each.path)
        (each.path / "critic").rename(each.path / "aside")
    store = _Slow(trained.job_dir)
    writer, learner = StateWriter(trained, ledger, store, epoch=7), snapshot.resume(trained, second.path, None)
    captured = writer.capture(learner)
    assert captured.measured["state/skipped"] == 0
    writer.follow(_published(trained, ledger, 1), captured)
    skipped = writer.capture(learner)
    assert skipped.measured == {"state/skipped": 1.0}
    writer.follow(_published(trained, ledger, 2), skipped)
    store.go.set()
    with closing(Curves(tmp_path / "curves", after=0)) as curves:
        writer.finish(learner, 2, curves)
    assert isinstance(read_state_manifest(first.path), StateManifest)
    assert isinstance(read_state_manifest(second.path), StateManifest)
    writer.close()


def test_the_state_of_a_version_that_was_not_registered_is_not_that_of_its_namesake(settings, ledger):
    """The answer to COMMIT was lost, and so was the transaction: the next version has its number."""

    class Losing(Training):
        def register(self, epoch, ids, *, publish, **how):
            def put(version):
                published = publish(version)
                if version == 2 and not lost:
                    lost.append(version)
                    raise LedgerUnavailable("the connection was closed")
                return published

            return super().register(epoch, ids, publish=put, **how)

    chosen, lost = settings(trainer={"total_steps": 2}), []
    commit(ledger, [sample(i) for i in range(16)])
    ledger.versions.ensure_base(chosen.model.model_path)
    ledger.training = Losing(ledger.transactions, ledger.rewards)
    TrainingLoop(chosen, ledger, Event()).run()
    assert lost == [2]
    newest = ledger.versions.newest()
    assert (newest.version, newest.step) == (2, 2)
    assert read_state_manifest(newest.path).manifest_sha256 == newest.manifest_sha256


def test_a_folder_whose_one_manifest_lists_everything_is_gone_on_from(trained, ledger):
    """As earlier releases wrote it."""
    newest = ledger.versions.newest()
    manifest = read_manifest(newest.path)
    whole = msgspec.structs.replace(manifest, files=tuple(files_at(newest.path, manifest)))
    (newest.path / "state_manifest.json").unlink()
    (newest.path / "manifest.json").write_bytes(msgspec.json.encode(whole))
    assert not is_weights_only(newest.path)
    check_files(newest.path, read_manifest(newest.path))
    (newest.path / "critic" / "value_head.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointRejected):
        check_files(newest.path, read_manifest(newest.path))


def test_a_state_is_there_after_a_clean_stop_and_stages_are_curves(settings, ledger):
    commit(ledger, [sample(i) for i in range(12)])
    chosen = settings(trainer={"total_steps": 3})
    run(chosen, Event())
    assert not is_weights_only(ledger.versions.get(3).path)
    for stage in ("weights", "probe", "sync", "register", "registered", "copy", "state", "prune"):
        assert points(chosen.tensorboard_dir / "trainer", f"time/publish/{stage}"), stage


def test_what_is_unwritten_is_told_while_the_state_is_put_in_its_place(settings, ledger, tmp_path):
    writer, staging = StateWriter(settings(), ledger, CheckpointStore(tmp_path), epoch=1), tmp_path / "staging"
    writer._pending, writer._staging = 100, staging
    (staging / "critic").mkdir(parents=True)
    (staging / "critic" / "model.safetensors").write_bytes(bytes(30))
    with moving(staging):
        found = {writer.unwritten for _ in range(20_000)}
    writer.close()
    assert found == {70, 100}
