"""Versions that are published while the next steps are made: exactly once all the same, and of one step each."""

import errno
import threading
import time
from threading import Event

import pytest
import torch
from structlog.testing import capture_logs

from tests.databases import put_file
from tests.trainer.factories import commit, points, sample
from tuneloop.shared.checkpoints import CheckpointStore, DiskSpace, is_weights_only, read_manifest, read_state_manifest
from tuneloop.shared.errors import LedgerUnavailable
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer.checkpoints import copies, publication, resumption, snapshot
from tuneloop.trainer.checkpoints.publication import Publisher
from tuneloop.trainer.checkpoints.resumption import StateWriter
from tuneloop.trainer.loop import TrainingLoop, run

pytestmark = pytest.mark.contract

_LONG_S = 120


class Held(Training):
    """The first version is registered only when `leases` batches were leased; what happens meanwhile is `before`."""

    def __init__(self, ledger, leases, before=lambda: None):
        super().__init__(ledger.transactions, ledger.rewards)
        self._left, self._before = leases, before
        self.enough, self._first = threading.Event(), True

    def lease(self, epoch, size, policy, *, held=()):
        rows = super().lease(epoch, size, policy, held=held)
        self._left -= bool(rows)
        if self._left <= 0:
            self.enough.set()
        return rows

    def register(self, epoch, ids, **how):
        if self._first:
            self._first = False
            assert self.enough.wait(_LONG_S), "no step was made while a version was published"
            self._before()
        return super().register(epoch, ids, **how)


def _trainer(chosen, ledger, training, stop=None):
    ledger.versions.ensure_base(chosen.model.model_path)
    ledger.training = training
    return TrainingLoop(chosen, ledger, stop or Event())


def _versions(ledger):
    return [(each.version, each.step, each.consumed) for each in ledger.versions.all()[1:]]


def _files(ledger, version):
    row = ledger.versions.get(version)
    return read_manifest(row.path, sha256=row.manifest_sha256).files


def _losses(chosen):
    return points(chosen.tensorboard_dir / "trainer", "actor/pg_loss")


@pytest.fixture
def straight(settings, tmp_path):
    """Four steps, each published before the next."""
    chosen = settings(trainer={"total_steps": 4, "max_checkpoints_to_keep": 9, "async_save": False})
    chosen = chosen.model_copy(update={"checkpoint_root_dir": tmp_path / "straight"})
    put_file(chosen.database_url, "migrated")
    ledger = Ledger(database.connect(chosen.database_url))
    commit(ledger, [sample(i) for i in range(16)])
    run(chosen, Event())
    yield chosen, ledger
    ledger.close()


def test_steps_are_made_while_a_version_is_published_and_it_has_the_weights_of_its_own_step(settings, ledger, straight):
    as_it_was, other = straight
    commit(ledger, [sample(i) for i in range(16)])
    chosen = settings(trainer={"total_steps": 4, "async_save": True})
    _trainer(chosen, ledger, Held(ledger, 3)).run()
    versions = _versions(ledger)
    assert versions[0] == (1, 1, 4)
    assert versions[1][1] >= 2
    assert versions[-1][1] == 4
    for version, step, _ in versions:
        assert _files(ledger, version) == _files(other, step)
    assert _losses(chosen) == _losses(as_it_was)
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 16}
    assert ledger.reports.imbalance() == []
    assert not is_weights_only(ledger.versions.newest().path)
    assert not list(chosen.job_dir.glob(".*"))


def test_what_a_rejected_version_was_the_parent_of_is_never_registered(settings, ledger):
    commit(ledger, [sample(i) for i in range(8)])
    chosen = settings(trainer={"total_steps": 1, "async_save": True})
    run(chosen, Event())
    longer = settings(trainer={"total_steps": 3, "async_save": True})
    commit(ledger, [sample(i) for i in range(8, 20)])
    held = Held(ledger, 2, lambda: ledger.versions.reject(1, "its probe differs"))
    with capture_logs() as logs:
        _trainer(longer, ledger, held).run()
    assert [each["version"] for each in logs if each["event"] == "training_goes_back"] == [1]
    parents = {each.version: read_manifest(each.path).parent for each in ledger.versions.all()[1:]}
    assert parents[1] == 0
    assert 1 not in parents.values()
    assert ledger.reports.counts()[State.TRAINED] == 16
    assert ledger.reports.imbalance() == []
    assert (
        ledger.versions.newest().step == 3
    )  # what version 1 learnt is gone with it, and its rows are not learnt twice


def test_who_is_erased_while_a_version_is_published_is_in_none_nor_is_what_was_learnt_on_top(settings, ledger):
    commit(ledger, [sample(i) for i in range(9)])
    with ledger.transactions.write() as connection:
        connection.exec_driver_sql("UPDATE exchanges SET user_id = 'ann' WHERE msg_id = 'm2'")
    chosen = settings(trainer={"total_steps": 2, "async_save": True})
    with capture_logs() as logs:
        _trainer(chosen, ledger, Held(ledger, 2, lambda: ledger.retention.erase("t", "ann"))).run()
    assert [each["event"] for each in logs].count("leases_lost") == 1
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8}
    assert sum(consumed for _, _, consumed in _versions(ledger)) == 8
    assert ledger.versions.newest().step == 2
    assert not list(chosen.job_dir.glob(".*"))


@pytest.mark.parametrize("late", [False, True])
def test_a_database_that_goes_away_while_a_version_is_published_costs_no_row(settings, ledger, straight, late):
    as_it_was, other = straight

    class Away(Held):
        def register(self, epoch, ids, **how):
            first = self._first
            if late or not first:
                super().register(epoch, ids, **how)
            if first:
                self._first = False
                raise LedgerUnavailable("the connection was closed")

    commit(ledger, [sample(i) for i in range(16)])
    chosen = settings(trainer={"total_steps": 4, "async_save": True})
    _trainer(chosen, ledger, Away(ledger, 2)).run()
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 16}
    assert ledger.reports.imbalance() == []
    assert _losses(chosen) == _losses(as_it_was)
    newest = ledger.versions.newest()
    assert newest.step == 4
    assert _files(ledger, newest.version) == _files(other, 4)


def test_a_stop_ends_what_has_begun_and_publishes_the_steps_that_waited_for_it(settings, ledger, straight):
    _, other = straight
    commit(ledger, [sample(i) for i in range(8)])
    chosen, stop = settings(trainer={"async_save": True}), Event()

    class Stopping(Held):
        def lease(self, epoch, size, policy, *, held=()):
            rows = super().lease(epoch, size, policy, held=held)
            if not rows:  # both steps are made, and the first is not registered yet
                stop.set()
                self.enough.set()
            return rows

    _trainer(chosen, ledger, Stopping(ledger, 99), stop).run()
    assert _versions(ledger) == [(1, 1, 4), (2, 2, 4)]
    newest = ledger.versions.newest()
    assert _files(ledger, 2) == _files(other, 2)
    assert read_state_manifest(newest.path).version == 2


def test_what_did_not_fit_is_in_the_next_version_with_the_steps_made_since(settings, ledger, monkeypatch):
    full = [True]

    def seal(self, staging, *, digests=None):
        if full and not staging.name.endswith("-state"):
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, staging, digests=digests)

    real = CheckpointStore.seal
    monkeypatch.setattr(CheckpointStore, "seal", seal)
    commit(ledger, [sample(i) for i in range(12)])
    chosen = settings(trainer={"total_steps": 3, "async_save": True})
    with capture_logs() as logs:
        run(chosen, Event())
    events = [each["event"] for each in logs]
    assert events.index("waiting_for_room") < events.index("disk_space_restored")
    assert sum(consumed for _, _, consumed in _versions(ledger)) == 12
    assert ledger.versions.newest().step == 3
    assert ledger.reports.counts()[State.TRAINED] == 12
    assert ledger.alarms.all() == []


def test_while_there_is_no_room_no_step_after_step_is_made(settings, ledger, monkeypatch):
    """They would be in no version, and from ever older rows."""
    tries = []

    def seal(self, staging, *, digests=None):
        if not staging.name.endswith("-state") and len(tries) < 6:
            tries.append(time.sleep(0.2))  # so long it takes to find out
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, staging, digests=digests)

    real = CheckpointStore.seal
    monkeypatch.setattr(CheckpointStore, "seal", seal)
    commit(ledger, [sample(i) for i in range(60)])
    run(settings(trainer={"total_steps": 12, "async_save": True}), Event())
    [first, *_] = [consumed for version, _, consumed in _versions(ledger) if version]
    assert len(tries) == 6
    assert first <= 6 * 4
    assert ledger.reports.counts()[State.TRAINED] == 48


@pytest.fixture
def published(settings, ledger):
    """Publishes a learner that has made a step; `meanwhile` changes it as soon as publishing has begun."""

    def publish(name, *, behind, meanwhile=lambda learner: None):
        chosen = settings(trainer={"dtype": "bfloat16"})
        learner = snapshot.load(chosen, None)
        learner.step([sample(i) for i in range(4)], version=0)
        held = ledger.training = Held(ledger, 1)
        publisher = Publisher(
            chosen, ledger, CheckpointStore(chosen.job_dir), epoch=held.take_epoch(name), behind=behind
        )
        publisher.prepare(learner)
        if not behind:
            held.enough.set()
        publisher.begin(learner, [], steps=1, parent=ledger.versions.newest().version)
        meanwhile(learner)
        held.enough.set()
        publisher.wait()
        ended = publisher.end(learner)
        publisher.close()
        return ledger.versions.get(ended.version), ended.measured

    ledger.versions.ensure_base(settings().model.model_path)
    return publish


def _spoil(learner):
    """Change all that a step changes."""
    with torch.no_grad():
        for tensor in (*learner.actor.tensors().values(), *learner.critic.state_dict().values()):
            tensor.add_(1)
        for optimizer in learner.optimizers.values():
            for tensor in dict(optimizer.state()).values():
                tensor.add_(1)
    learner.generator.manual_seed(99)
    learner.steps += 7


def test_what_is_published_behind_is_what_the_learner_was(published):
    before, _ = published("before", behind=False)
    behind, measured = published("behind", behind=True, meanwhile=_spoil)
    expected, found = read_manifest(before.path), read_manifest(behind.path)
    assert (found.files, found.step, found.probe) == (expected.files, expected.step, expected.probe)
    assert read_state_manifest(behind.path).files == read_state_manifest(before.path).files
    assert measured["time/publish/staged"] > 0
    assert measured["time/save_checkpoint"] < measured["time/publish/registered"]


def test_without_room_for_a_copy_a_version_is_published_before_the_next_step(settings, ledger, monkeypatch):
    monkeypatch.setattr(copies, "_has_memory_for", lambda size: False)
    commit(ledger, [sample(i) for i in range(8)])
    with capture_logs() as logs:
        run(settings(trainer={"total_steps": 2, "async_save": True}), Event())
    assert [each["event"] for each in logs].count("published_in_the_foreground") == 2
    assert _versions(ledger) == [(1, 1, 4), (2, 2, 4)]
    assert not is_weights_only(ledger.versions.newest().path)


def test_a_version_does_not_take_the_room_of_the_state_that_is_being_written(settings, ledger, monkeypatch):
    chosen = settings()
    ledger.versions.ensure_base(chosen.model.model_path)
    learner, store = snapshot.load(chosen, None), _HeldState(chosen.job_dir)
    weights, state = snapshot.size_of_weights(learner), snapshot.size_of_state(learner)
    free = [10 * (weights + state)]

    def measured(folder, *, needed):
        return DiskSpace(folder, needed, reserve=0, free=free[0])

    for module in (publication, resumption):
        monkeypatch.setattr(module, "measure_space", measured)
    epoch = ledger.training.take_epoch("t")
    publisher = Publisher(chosen, ledger, store, epoch=epoch, behind=True)
    publisher.states = _Releasing(chosen, ledger, store, epoch=epoch)
    publisher.begin(learner, [], steps=1, parent=0)
    publisher.wait()
    publisher.end(learner)
    assert publisher.states.unwritten == state, "nothing of it is on the disk"
    publisher.begin(learner, [], steps=1, parent=1)
    publisher.wait()
    publisher.end(learner)
    assert not store.go.is_set(), "there is room for both, and nobody waits"
    free[0] = weights + state // 2
    publisher.begin(learner, [], steps=1, parent=2)
    assert store.go.is_set(), "there is room for one of them, and the state came first"
    publisher.wait()
    assert publisher.end(learner).version == 3
    publisher.close()


class _Releasing(StateWriter):
    """The state is held until it is waited for."""

    def join(self):
        self._store.go.set()
        super().join()


class _HeldState(CheckpointStore):
    """A state is staged as soon as it may be."""

    def __init__(self, folder):
        super().__init__(folder)
        self.go = threading.Event()

    def stage(self, epoch, *, state=False):
        assert not state or self.go.wait(_LONG_S)
        return super().stage(epoch, state=state)
