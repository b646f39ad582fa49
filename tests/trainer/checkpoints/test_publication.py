"""A version is whole or not there, and old ones go when they may."""

import errno
import time
from threading import Event

import pytest

from tests.trainer.factories import commit, sample
from tuneloop.shared import checkpoints
from tuneloop.shared.checkpoints import CheckpointStore
from tuneloop.shared.errors import DiskFull, EnvironmentRefused
from tuneloop.shared.job_marks import registered_in
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.publication import Publication, Publisher
from tuneloop.trainer.checkpoints.resumption import StateWriter, prune
from tuneloop.trainer.checkpoints.snapshot import DiskPriority
from tuneloop.trainer.loop import run

pytestmark = pytest.mark.contract


class FullDisk(CheckpointStore):
    """Takes the first files, then no more."""

    def seal(self, staging, *, digests=None):
        raise OSError(errno.ENOSPC, "No space left on device")


class NotWritable(CheckpointStore):
    """The folder of the counters cannot be made."""

    def stage(self, epoch, *, state=False):
        staging = super().stage(epoch, state=state)
        (staging / "trainer_state").write_text("in the way")
        return staging


@pytest.mark.parametrize(
    ("store", "refusal"),
    [
        (FullDisk, pytest.raises(DiskFull, match=r"No space left on device; the next checkpoint needs \d")),
        (NotWritable, pytest.raises(EnvironmentRefused, match=r"^checkpoint_root_dir: cannot write a checkpoint")),
    ],
)
def test_a_version_that_the_disk_does_not_take_leaves_nothing(settings, ledger, store, refusal):
    chosen = settings()
    ledger.versions.ensure_base(chosen.model.model_path)
    epoch = ledger.training.take_epoch("t")
    commit(ledger, [sample(i) for i in range(4)])
    rows = ledger.training.lease(epoch, 4, BatchRules())
    learner = snapshot.load(chosen, None)
    weights, probe = snapshot.weights_of(learner), snapshot.probe(learner, chosen)
    publication = Publication(chosen, store(chosen.job_dir), weights, probe, epoch=epoch, parent=0)
    with refusal:
        publication.register(ledger.training, [row.id for row in rows])
    assert [each.version for each in ledger.versions.all()] == [0]
    assert not list(chosen.job_dir.glob(".staging*"))
    assert not list(chosen.job_dir.glob("global_step_*"))


class _Attentive(StateWriter):
    """Remembers what explorers had been told when it began."""

    def capture(self, learner, **how):
        self.known = registered_in(self._settings.job_dir).version
        return super().capture(learner, **how)


def test_explorers_hear_of_a_version_before_critic_and_optimiser_are_copied(settings, ledger):
    chosen = settings()
    ledger.versions.ensure_base(chosen.model.model_path)
    epoch, store = ledger.training.take_epoch("t"), CheckpointStore(chosen.job_dir)
    publisher = Publisher(chosen, ledger, store, epoch=epoch)
    publisher.states = _Attentive(chosen, ledger, store, epoch=epoch)
    learner = snapshot.load(chosen, None)
    publisher.begin(learner, [], steps=0, parent=0)
    assert publisher.end(learner).version == 1
    publisher.close()
    assert publisher.states.known == 1


def test_a_state_that_is_being_written_waits_while_a_version_is(settings, ledger, monkeypatch):
    monkeypatch.setattr(snapshot, "_PATIENCE_S", 60.0)
    chosen, waiting, seen = settings(), Event(), []
    ledger.versions.ensure_base(chosen.model.model_path)
    epoch, store = ledger.training.take_epoch("t"), CheckpointStore(chosen.job_dir)
    publisher, learner = Publisher(chosen, ledger, store, epoch=epoch), snapshot.load(chosen, None)
    wait, save_weights = DiskPriority.wait, snapshot.save_weights

    def notice(priority):
        waiting.set()
        wait(priority)
        seen.append("state")

    def write_slowly(*weights, **where):
        """Of the second version; the first one's state is not written yet."""
        go.set()
        assert waiting.wait(60)
        time.sleep(0.2)
        seen.append("weights")
        return save_weights(*weights, **where)

    go = _held_back(monkeypatch)
    publisher.begin(learner, [], steps=0, parent=0)
    publisher.end(learner)
    monkeypatch.setattr(DiskPriority, "wait", notice)
    monkeypatch.setattr(snapshot, "save_weights", write_slowly)
    publisher.begin(learner, [], steps=0, parent=1)
    publisher.end(learner)
    publisher.close()
    assert seen[0] == "weights"
    assert "state" in seen


def _held_back(monkeypatch):
    """What lets states be written."""
    go, save_state = Event(), snapshot.save_state

    def save(*state, **where):
        assert go.wait(60)
        return save_state(*state, **where)

    monkeypatch.setattr(snapshot, "save_state", save)
    return go


def _published(ledger, store, count):
    epoch = ledger.training.take_epoch("t")

    def put(version):
        store.path(version).mkdir(parents=True)
        return store.path(version), "0" * 64

    for step in range(count):
        ledger.training.register(epoch, [], step=step, publish=put)


def _there(store, upto=12):
    return [version for version in range(upto) if store.path(version).exists()]


def test_all_but_the_last_go_when_they_are_retired(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 6)
    ledger.versions.promote(6)
    prune(store, ledger.versions, keep=2)
    assert _there(store) == [5, 6]


def test_every_so_manieth_step_stays_besides(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 8)  # version 1 is of step 0
    ledger.versions.promote(8)
    prune(store, ledger.versions, keep=1, keep_interval=3)
    assert _there(store) == [1, 4, 7, 8]


def test_what_a_rollback_would_go_back_to_stays(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 6)
    for version in (2, 6):
        ledger.versions.promote(version)
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 2, 5, 6]
    for number, before in ((6, 2), (2, 0)):
        assert ledger.versions.roll_back(number, by="ann", reason="worse") == before
        assert ledger.versions.champion().path.exists()
        assert ledger.versions.newest().path.exists()


@pytest.mark.parametrize("state", ["canary", "champion"])
def test_what_training_goes_on_from_after_a_rollback_stays(settings, ledger, state):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 3)
    ledger.versions.promote(1)
    serve = {"canary": ledger.versions.begin_canary, "champion": ledger.versions.promote}
    serve[state](3, by="explorer", reason="a tenth")  # 2 retires unserved
    _published(ledger, store, 5)
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 2, 3, 4, 5, 6, 7, 8]
    ledger.versions.roll_back(3, by="explorer", reason="worse")
    assert ledger.versions.newest().version == 2
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 2, 8]


def test_what_served_and_is_gone_on_from_once_all_around_it_are_ended_stays(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 5)
    ledger.versions.promote(3)
    ledger.versions.begin_canary(4, by="explorer", reason="a tenth")
    ledger.versions.appoint(1, instead_of=3, by="ann", reason="the show")  # the canary retires
    ledger.versions.appoint(3, instead_of=1, by="ann", reason="over")
    _published(ledger, store, 3)
    ledger.versions.begin_canary(6, by="explorer", reason="a tenth")  # 5 retires unserved
    prune(store, ledger.versions, keep=1)
    ledger.versions.roll_back(3, by="ann", reason="worse")
    assert ledger.versions.newest().version == 4
    assert store.path(4).exists()


def test_a_version_that_is_decided_about_while_others_are_deleted_stays(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 6)
    for version in (1, 2, 3, 6):
        ledger.versions.promote(version)

    def decide(versions):
        assert 1 in versions
        ledger.versions.appoint(1, instead_of=6, by="ann", reason="6 is rude")
        return []

    prune(store, ledger.versions, keep=1, still_sampled=decide)
    assert _there(store) == [1, 2, 3, 5, 6]
    assert not list(store.path(1).parent.glob(".garbage*"))


def test_the_canary_stays_however_old(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 6)
    ledger.versions.promote(1)
    ledger.versions.begin_canary(4, by="explorer", reason="a tenth")
    for version in (5, 6):
        ledger.versions.reject(version, "its probe differs")
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 3, 4, 6]


def test_what_is_pinned_stays_however_old(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 4)
    ledger.versions.promote(1)
    ledger.versions.pin(1, instead_of=1, by="ann", reason="the show")
    for version in (2, 3, 4):
        ledger.versions.reject(version, "its probe differs")
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 4]


def test_the_champion_and_the_candidates_stay_however_old(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 6)
    ledger.versions.promote(2)
    for version in (5, 6):
        ledger.versions.reject(version, "its probe differs")
    prune(store, ledger.versions, keep=1)
    assert _there(store) == [1, 2, 3, 4, 6]


def _whole(store, version):
    path = store.path(version)
    for name in ("actor/model", "critic/model", "trainer_state/actor", "trainer_state/critic", "trainer_state/random"):
        (path / f"{name}.safetensors").parent.mkdir(exist_ok=True)
        (path / f"{name}.safetensors").touch()
    (path / "trainer_state" / "state.json").touch()


@pytest.mark.parametrize("keep", [0, 3])
def test_only_what_training_goes_on_from_keeps_critic_and_optimiser(settings, ledger, keep):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 4)
    for version in range(1, 5):
        _whole(store, version)
    ledger.versions.promote(2)
    ledger.versions.reject(4, "its probe differs")
    prune(store, ledger.versions, keep=keep)
    sizes = {version: sum(path.is_file() for path in store.path(version).rglob("[!.]*")) for version in (2, 3, 4)}
    assert sizes == {2: 3, 3: 6, 4: 3}
    assert sorted(path.name for path in store.path(2).rglob("*.*")) == [
        ".weights-only",
        "model.safetensors",
        "random.safetensors",
        "state.json",
    ]


def _has_critic(path):
    return (path / "critic" / "model.safetensors").exists()


@pytest.fixture
def of_critics(monkeypatch):
    """These checkpoints have no manifests: a state is a critic."""
    monkeypatch.setattr(checkpoints, "is_weights_only", lambda path: not _has_critic(path))


@pytest.mark.usefixtures("of_critics")
def test_the_only_state_stays_however_many_versions_came_without_one(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 9)
    _whole(store, 2)
    ledger.versions.promote(9)
    prune(store, ledger.versions, keep=2, writing=9)
    assert _there(store) == [2, 8, 9]
    assert _has_critic(store.path(2))
    _whole(store, 9)
    prune(store, ledger.versions, keep=2)
    assert _there(store) == [8, 9]


@pytest.mark.usefixtures("of_critics")
def test_the_state_of_a_version_that_was_given_up_is_no_reason_to_delete_another(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 3)
    for version in (1, 2):
        _whole(store, version)
    ledger.versions.reject(2, "its probe differs")
    prune(store, ledger.versions, keep=5)
    assert [_has_critic(store.path(version)) for version in (1, 2, 3)] == [True, False, False]


def test_keeping_0_keeps_all(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 4)
    ledger.versions.promote(4)
    prune(store, ledger.versions, keep=0)
    assert _there(store) == [1, 2, 3, 4]


def test_a_checkpoint_that_is_just_being_registered_is_let_alone(settings, ledger):
    store = CheckpointStore(settings().job_dir)
    ledger.versions.ensure_base(settings().model.model_path)
    _published(ledger, store, 2)
    store.path(3).mkdir()
    prune(store, ledger.versions, keep=1)
    assert 3 in _there(store)


@pytest.mark.parametrize(("said", "rights"), [({}, 0o600), ({"checkpoint_mode": "0640"}, 0o640)])
def test_a_checkpoint_has_the_rights_of_the_settings(settings, ledger, said, rights):
    commit(ledger, [sample(i) for i in range(4)])
    run(settings(trainer={"total_steps": 1} | said), Event())
    path = ledger.versions.newest().path
    found = {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()}
    assert found == {rights}
    assert {each.stat().st_mode & 0o777 for each in (path, path / "actor")} == {rights | rights >> 2 & 0o111}
