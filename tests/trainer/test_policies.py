"""Several policies on one base model: each is trained as if it were alone, whatever comes between."""

import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from structlog.testing import capture_logs

from tests.databases import put_file
from tests.trainer.factories import commit, eventually, points, run_until, sample
from tests.trainer.fine_tuning import LORA
from tuneloop.shared.checkpoints import is_weights_only, read_manifest
from tuneloop.shared.experience import PolicyState, State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer import policies
from tuneloop.trainer.loop import TrainingLoop, run

pytestmark = pytest.mark.contract

GRPO = {"algorithm.algorithm_type": "reinforce", "algorithm.kl_coef": 0.0}


@pytest.fixture
def created(ledger, adapted):
    """Makes policies, of which the first is number 1."""

    def create(name, **options):
        ledger.versions.ensure_base(adapted().model.model_path)
        return ledger.policies.create(name, settings=options.pop("settings", {}), by="ops", **options).id

    return create


def _rows(ledger, policy, numbers, **but):
    version = ledger.versions.of(policy).champion().version
    commit(ledger, [sample(i, version_min=version, version_max=version, **but) for i in numbers], policy=policy)


def _adapters(ledger, policy):
    """The hashes of what each version of a policy has learnt, but those that it begins with."""
    found = []
    for row in ledger.versions.of(policy).now().versions:
        if row.consumed:
            files = read_manifest(row.path, sha256=row.manifest_sha256).files
            found.append({each.path: each.sha256 for each in files if "adapter" in each.path or "random" in each.path})
    return found


def _made(ledger):
    return [(each.policy, each.step, each.consumed) for each in ledger.versions.all() if each.consumed]


def _other(adapted, tmp_path, name, **but):
    """Another experiment with a ledger of its own."""
    chosen = adapted(**but).model_copy(update={"checkpoint_root_dir": tmp_path / name})
    put_file(chosen.database_url, "migrated")
    ledger = Ledger(database.connect(chosen.database_url))
    ledger.versions.ensure_base(chosen.model.model_path)
    return chosen, ledger


#: Of each policy: its options, and its rows.
POLICIES = {"one": ({}, range(100, 112)), "two": ({"model.lora.rank": 2, "trainer.seed": 9} | GRPO, range(200, 212))}


@pytest.fixture
def alone(adapted, tmp_path):
    """What a trainer makes that has one policy alone; None: the default policy."""

    def train(name, **but):
        chosen, other = _other(adapted, tmp_path, f"{name} alone", **but)
        options, numbers = POLICIES.get(name, ({}, range(12)))
        policy = other.policies.create(name, settings=options, by="ops").id if name else 0
        _rows(other, policy, numbers)
        if policy:
            other.policies.pause(0)
        run(chosen, Event())
        found = _adapters(other, policy)
        other.close()
        return found

    return train


def _all_rows(ledger, created):
    numbers = [created(name, settings=options) for name, (options, _) in POLICIES.items()]
    _rows(ledger, 0, range(12))
    for number, (_, ids) in zip(numbers, POLICIES.values(), strict=True):
        _rows(ledger, number, ids)
    return numbers


def test_policies_alternate_and_each_learns_to_the_bit_what_it_learns_alone(adapted, ledger, created, alone):
    chosen = adapted(trainer={"total_steps": 3})
    one, two = _all_rows(ledger, created)
    run(chosen, Event())
    assert _made(ledger) == [(policy, step, 4) for step in (1, 2, 3) for policy in (0, one, two)]
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 36}
    assert ledger.reports.imbalance() == []
    for policy, name in ((0, None), (one, "one"), (two, "two")):
        assert _adapters(ledger, policy) == alone(name, trainer={"total_steps": 3})
    curves = [len(points(chosen.tensorboard_dir / f"trainer{name}", "actor/pg_loss")) for name in ("", "-one", "-two")]
    assert curves == [3, 3, 3]
    manifests = [read_manifest(each.path) for each in ledger.versions.of(two).now().versions if each.consumed]
    assert [each.parent for each in manifests] == [2, *(each.version for each in manifests[:-1])]


def test_where_memory_has_room_for_one_others_go_on_from_the_disk_to_the_bit(
    adapted, ledger, created, alone, monkeypatch
):
    monkeypatch.setattr(policies, "POLICIES_IN_MEMORY", 1)
    one, two = _all_rows(ledger, created)
    with capture_logs() as logs:
        run(adapted(trainer={"total_steps": 3}), Event())
    assert sum(each["event"] == "trainer_ready" for each in logs) == 9
    assert _made(ledger) == [(policy, step, 4) for step in (1, 2, 3) for policy in (0, one, two)]
    for policy, name in ((0, None), (one, "one"), (two, "two")):
        assert _adapters(ledger, policy) == alone(name, trainer={"total_steps": 3})


def test_a_kill_costs_no_policy_a_row_and_changes_no_weight(adapted, ledger, created, alone, start):
    """Under a step that no version has, of a policy that others have made versions before."""
    but = {"save_interval": 2, "total_steps": 3}
    one, two = (created(name, settings=options) for name, (options, _) in POLICIES.items())
    rows = {one: range(100, 112), two: range(200, 212), 0: range(12)}
    for policy, numbers in rows.items():
        _rows(ledger, policy, numbers[: 8 if policy else 4])
    trainer = start(model={"model_path": adapted().model.model_path, "lora": LORA}, trainer=but | {"device": "cpu"})

    def are_kept():
        counts, newest = ledger.reports.counts(), [ledger.versions.of(each).newest() for each in (one, two)]
        made = (counts[State.TRAINED], counts[State.LEASED]) == (16, 4)
        return made and not any(is_weights_only(each.path) for each in newest)

    eventually(are_kept, within_s=20)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    for policy, numbers in rows.items():
        _rows(ledger, policy, numbers[8 if policy else 4 :])
    run(adapted(trainer=but), Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 36}
    assert ledger.reports.imbalance() == []
    assert sorted(_made(ledger)) == [
        (policy, step, count) for policy in (0, one, two) for step, count in ((2, 8), (3, 4))
    ]
    for policy, name in ((0, None), (one, "one"), (two, "two")):
        assert _adapters(ledger, policy) == alone(name, trainer=but)


def test_steps_that_are_too_few_for_a_version_are_published_when_another_policy_waits(adapted, ledger, created):
    one = created("one")
    _rows(ledger, 0, range(8))
    stop = Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run, adapted(trainer={"save_interval": 8}), stop)
        eventually(lambda: trainer.done() or ledger.reports.counts()[State.LEASED] == 8)
        assert _made(ledger) == []
        _rows(ledger, one, range(100, 104))
        eventually(lambda: trainer.done() or _made(ledger))
        stop.set()
        trainer.result(30)
    assert _made(ledger)[0] == (0, 2, 8)


class Deleting(Training):
    """An administrator deletes a policy as soon as it has a batch; other policies are left alone."""

    def lease(self, epoch, size, rules, *, held=()):
        rows = super().lease(epoch, size, rules, held=held)
        if rows and rules.policy and self.policies.get(rules.policy).state is PolicyState.ACTIVE:
            self.act(rules.policy)
        return rows


@pytest.fixture
def disturbed(adapted, ledger, created):
    """Trains default and a policy, with which `act` does something as soon as it has a batch."""

    def train(act, **but):
        one = created("one")
        _rows(ledger, 0, range(8))
        _rows(ledger, one, range(100, 112))
        chosen = adapted(trainer={"total_steps": 2} | but)
        ledger.training = Deleting(ledger.transactions, ledger.rewards)
        ledger.training.policies, ledger.training.act = ledger.policies, act
        TrainingLoop(chosen, ledger, Event()).run()
        return one

    return train


@pytest.mark.parametrize("interval", [1, 3])
def test_a_policy_that_is_deleted_under_a_step_is_given_up_and_the_others_go_on(ledger, disturbed, interval):
    disturbed(lambda number: ledger.policies.delete(number, by="ops"), save_interval=interval)
    assert {policy for policy, _, _ in _made(ledger)} == {0}
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8, State.DROPPED: 12}
    assert ledger.reports.imbalance() == []


def test_a_policy_that_is_paused_under_a_step_ends_it_and_takes_no_more(ledger, disturbed):
    one = disturbed(ledger.policies.pause, save_interval=2)
    assert _made(ledger) == [(0, 2, 8), (one, 1, 4)] or _made(ledger) == [(0, 2, 8)]
    waiting = ledger.reports.counts()[State.COMMITTED]
    assert waiting == 12 - 4 * (len(_made(ledger)) - 1)


class Rejecting(Training):
    """An explorer refuses every version of a policy."""

    def register(self, epoch, ids, *, policy, **how):
        version = super().register(epoch, ids, policy=policy, **how)
        if policy:
            self.versions.of(policy).reject(version, "its probe differs")
        return version


def test_a_policy_whose_versions_are_all_rejected_stops_and_no_other(adapted, ledger, created):
    one = created("one")
    _rows(ledger, 0, range(16))
    _rows(ledger, one, range(100, 130))
    ledger.training = Rejecting(ledger.transactions, ledger.rewards)
    ledger.training.versions = ledger.versions
    stop = Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(TrainingLoop(adapted(), ledger, stop).run)
        eventually(lambda: trainer.done() or (ledger.alarms.all() and ledger.versions.newest().step == 4))
        stop.set()
        trainer.result(30)
    assert [(alarm.name, alarm.policy) for alarm in ledger.alarms.all()] == [("versions_rejected", one)]
    made = [each.policy for each in ledger.versions.all() if each.consumed]
    assert (made.count(0), made.count(one)) == (4, 3)
    assert ledger.versions.of(one).newest().version == 1


def test_a_policy_begins_with_an_adapter_and_one_that_does_not_fit_is_paused_with_a_reason(adapted, ledger, created):
    one = created("one")
    _rows(ledger, one, range(100, 104))
    run_until(adapted(), lambda: _made(ledger))
    parent = ledger.versions.of(one).newest()
    like, odd = (
        ledger.policies.create(name, parent=parent.version, settings=options, by="ops").id
        for name, options in (("like", {}), ("odd", {"model.lora.rank": 8}))
    )
    for policy, first in ((like, 200), (odd, 300), (0, 400)):
        _rows(ledger, policy, range(first, first + 4))
    run_until(adapted(), lambda: len(_made(ledger)) == 3)
    assert sorted(_made(ledger)) == [(0, 1, 4), (one, 1, 4), (like, 1, 4)]
    assert ledger.policies.get(odd).state is PolicyState.PAUSED
    [alarm] = ledger.alarms.all()
    assert (alarm.name, alarm.policy) == ("policy_refused", odd)
    assert "has rank 4, alpha 8 and targets" in alarm.reason
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 12, State.COMMITTED: 4}


def test_what_a_policy_learnt_is_gone_on_from_when_it_is_promoted(adapted, ledger, created, alone):
    """With its optimizer and its random numbers: the next step is the one that the policy itself would make.

    But for what it is held to, which is the promoted version from then on.
    """
    free = {"kl_coef": 0.0}
    one = created("one")
    _rows(ledger, one, range(100, 108))
    run_until(adapted(algorithm=free), lambda: len(_made(ledger)) == 2)
    ledger.versions.of(one).promote(ledger.versions.of(one).newest().version)
    promoted = ledger.policies.promote(one, by="ops")
    _rows(ledger, 0, range(108, 112))
    run_until(adapted(algorithm=free), lambda: len(_made(ledger)) == 3)
    newest = ledger.versions.newest()
    assert (newest.step, read_manifest(newest.path).parent) == (3, promoted)
    assert _adapters(ledger, 0)[-1] == alone("one", trainer={"total_steps": 3}, algorithm=free)[-1]


def test_a_folder_that_versions_share_is_kept_while_any_of_them_is(adapted, ledger, created):
    """And of a policy that was deleted none is, but what others begin with."""
    chosen = adapted(trainer={"max_checkpoints_to_keep": 1})
    one = created("one")
    _rows(ledger, one, range(100, 104))
    run_until(chosen, lambda: _made(ledger))
    parent = ledger.versions.of(one).newest()
    created("like", parent=parent.version)
    _rows(ledger, one, range(104, 112))
    run_until(chosen, lambda: len(_made(ledger)) == 3)
    ledger.policies.delete(one, by="ops")
    _rows(ledger, 0, range(4))
    run_until(chosen, lambda: len(_made(ledger)) == 4)
    kept = {each.path for each in ledger.versions.all() if not each.is_base and each.path.exists()}
    assert kept == {parent.path, ledger.versions.newest().path}
