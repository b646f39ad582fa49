"""Each policy has a line of versions and a queue of rows of its own."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.factories import committed, experience, published
from tuneloop.shared.errors import ParentEnded, PolicyRefused, VersionRefused
from tuneloop.shared.experience import PolicyState, State
from tuneloop.shared.ledger.ledger import Alarm, BatchRules, Ledger
from tuneloop.shared.ledger.training.training import _WAITING_ROWS
from tuneloop.shared.settings.policies import settings_of_policy
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def based(ledger: Ledger) -> Ledger:
    ledger.versions.ensure_base(Path("/base"))
    return ledger


def of(ledger: Ledger, policy: int, count: int, **but: object) -> None:
    version = ledger.versions.of(policy).champion().version
    said = experience(version_min=version, version_max=version)
    sent = committed(ledger, count, policy=policy, experiences=(said,), **but)
    assert len(sent) == count


def step(ledger: Ledger, epoch: int, policy: int, count: int) -> int:
    rows = ledger.training.lease(epoch, count, BatchRules(policy=policy))
    assert len(rows) == count
    line = ledger.versions.of(policy)
    ids = [row.id for row in rows]
    return ledger.training.register(epoch, ids, step=1, publish=published, parent=line.newest().version, policy=policy)


def test_a_policy_begins_with_the_weights_of_its_parent(based: Ledger) -> None:
    made = based.policies.create("support", tenant="acme", by="ops", settings={"algorithm.algorithm_type": "grpo"})
    begun = based.versions.of(made.id).champion()
    assert (begun.version, begun.path, begun.policy, begun.is_base) == (1, Path("/base"), made.id, True)
    assert based.policies.find("support", "acme") == made
    assert made.settings == {"algorithm.algorithm_type": "grpo"}
    assert based.versions.champion().version == 0
    assert [each.name for each in based.policies.all("other")] == ["default"]


def test_versions_of_one_policy_do_not_touch_those_of_another(based: Ledger) -> None:
    one, other = (based.policies.create(name, by="ops").id for name in ("one", "other"))
    epoch = based.training.take_epoch("trainer")
    for policy in (one, other, 0):
        of(based, policy, 2, task_id=f"task {policy}")
    first, second, third = (step(based, epoch, policy, 2) for policy in (one, other, 0))
    assert (first, second, third) == (3, 4, 5)
    based.versions.of(one).promote(first)
    based.versions.of(other).promote(second)
    champions = [based.versions.of(each).champion().version for each in (0, one, other)]
    assert champions == [0, 3, 4]
    assert based.versions.candidate() == based.versions.get(third)
    assert based.versions.of(one).roll_back(first, by="ops", reason="worse") == 1
    assert [based.versions.of(each).champion().version for each in (0, one, other)] == [0, 1, 4]
    with pytest.raises(VersionRefused, match="there is no version 4"):
        based.versions.of(one).pin(4, instead_of=1, by="ops", reason="")
    assert based.reports.imbalance() == []


def test_a_batch_is_of_one_policy(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    epoch = based.training.take_epoch("trainer")
    of(based, made, 3)
    of(based, 0, 1)
    assert based.training.lease(epoch, 2, BatchRules()) == []
    assert len(based.training.lease(epoch, 3, BatchRules(policy=made))) == 3
    assert len(based.training.lease(epoch, 1, BatchRules())) == 1


def test_staleness_is_in_versions_of_the_policy(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    epoch = based.training.take_epoch("trainer")
    of(based, made, 1)
    for _ in range(3):  # of another policy
        of(based, 0, 1)
        step(based, epoch, 0, 1)
    assert len(based.training.lease(epoch, 1, BatchRules(policy=made, max_staleness=0))) == 1


def test_a_deleted_policy_drops_what_waits_and_registers_nothing(based: Ledger, engine: Engine) -> None:
    made = based.policies.create("side", by="ops").id
    epoch = based.training.take_epoch("trainer")
    of(based, made, 2)
    [row] = based.training.lease(epoch, 1, BatchRules(policy=made))
    based.policies.delete(made, by="ops")
    with pytest.raises(ParentEnded, match="was deleted"):
        based.training.register(epoch, [row.id], step=1, publish=published, parent=1, policy=made)
    assert based.reports.counts()[State.DROPPED] == 1
    with pytest.raises(PolicyRefused, match="there is no policy side; there are default"):
        based.policies.find("side")
    assert based.policies.create("side", by="ops").id == made + 1


def test_a_policy_that_is_paused_stays_seen(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    based.policies.pause(made)
    assert based.policies.find("side").state is PolicyState.PAUSED
    based.policies.pause(made, paused=False)
    assert based.policies.find("side").state is PolicyState.ACTIVE


def test_what_a_policy_learnt_is_promoted_as_a_candidate(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    with pytest.raises(PolicyRefused, match="version 1 is not trained"):
        based.policies.promote(made, by="ops")
    epoch = based.training.take_epoch("trainer")
    of(based, made, 1)
    based.versions.of(made).promote(version := step(based, epoch, made, 1))
    number = based.policies.promote(made, by="ops")
    candidate, source = based.versions.candidate(), based.versions.get(version)
    assert candidate is not None
    assert source is not None
    assert (candidate.version, candidate.path, candidate.consumed) == (number, source.path, 0)
    assert based.versions.newest() == candidate
    assert based.reports.imbalance() == []


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "@1", "default"])
def test_names_that_are_none_or_taken_are_refused(based: Ledger, name: str) -> None:
    with pytest.raises(PolicyRefused):
        based.policies.create(name, by="ops")


def test_tenants_have_policies_of_one_name_and_see_their_own(based: Ledger) -> None:
    one = based.policies.create("chat", tenant="acme", by="ops")
    other = based.policies.create("chat", tenant="umbra", by="ops")
    assert based.policies.find("chat", "acme") == one
    assert based.policies.find("chat", "umbra") == other
    with pytest.raises(PolicyRefused, match="several tenants"):
        based.policies.find("chat")
    with pytest.raises(PolicyRefused, match="there is no version 1 to begin with"):
        based.policies.create("mine", tenant="umbra", parent=1, by="ops")


def test_options_of_a_policy_are_checked(tmp_path: Path) -> None:
    settings = Settings(model={"model_path": tmp_path})
    assert (
        settings_of_policy(settings, {"algorithm.algorithm_type": "reinforce"}).algorithm.algorithm_type == "reinforce"
    )
    with pytest.raises(PolicyRefused, match="has no such option"):
        settings_of_policy(settings, {"explorer.proxy_port": 1})
    with pytest.raises(PolicyRefused, match="algorithm_type"):
        settings_of_policy(settings, {"algorithm.algorithm_type": "nothing"})


def test_policies_that_learnt_from_a_row_are_named(based: Ledger) -> None:
    epoch = based.training.take_epoch("trainer")
    one, other = (based.policies.create(name, by="ops").id for name in ("one", "other"))
    of(based, one, 1)
    first = step(based, epoch, one, 1)
    based.versions.of(one).promote(first)
    of(based, other, 1)
    step(based, epoch, other, 1)
    based.policies.create("child", parent=first, by="ops")
    assert based.policies.learnt_from([first]) == ["one", "child"]
    based.policies.promote(one, by="ops")
    assert based.policies.learnt_from([first]) == ["default", "one", "child"]
    assert based.policies.learnt_from([]) == []


def test_it_is_told_what_waits_of_each_policy_since_when(based: Ledger) -> None:
    one, other = (based.policies.create(name, by="ops").id for name in ("one", "other"))
    of(based, one, 3)
    of(based, other, 1)
    based.policies.pause(other)
    found = based.training.waiting(2)
    assert [(each.policy.id, each.rows) for each in found] == [(0, 0), (one, 2), (other, 1)]
    assert found[2].policy.state is PolicyState.PAUSED
    assert found[1].seconds >= found[2].seconds >= found[0].seconds == 0.0
    assert found[1].fill(2, None)
    assert not found[2].fill(2, None)
    assert found[2].fill(2, 0.0)
    assert not found[0].fill(2, 0.0)
    based.policies.delete(one, by="ops")
    assert [each.policy.id for each in based.training.waiting(2)] == [0, other]


def test_what_waits_is_looked_up_in_an_index(based: Ledger, engine: Engine) -> None:
    """However many rows wait: of each policy the first few are read."""
    hint = "INDEXED BY ix_experiences_waiting" if engine.dialect.name == "sqlite" else ""
    if not hint:
        pytest.skip("Postgres plans by what is there")
    with engine.connect() as connection:
        query = f"EXPLAIN QUERY PLAN {_WAITING_ROWS.format(hint=hint)}"
        plan = [row.detail for row in connection.execute(text(query), {"most": 4})]
    assert sum("ix_experiences_waiting (policy=?)" in each for each in plan) == 2
    assert not [each for each in plan if "SCAN experiences" in each or "TEMP B-TREE" in each]


def test_rows_that_a_trainer_gives_back_of_a_deleted_policy_are_dropped(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    of(based, made, 2)
    epoch = based.training.take_epoch("trainer")
    based.training.lease(epoch, 1, BatchRules(policy=made))
    based.policies.delete(made, by="ops")
    based.training.release(epoch)
    assert based.reports.counts()[State.DROPPED] == 2
    assert based.reports.imbalance() == []


def test_an_alarm_is_of_one_policy(based: Ledger) -> None:
    made = based.policies.create("side", by="ops").id
    held = Alarm("entropy", "it fell", holds=True)
    assert based.alarms.raise_alarm(held)
    assert based.alarms.raise_alarm(held._replace(policy=made))
    assert not based.alarms.of(made).raise_alarm(held)
    assert [each.policy for each in based.alarms.all()] == [0, made]
    assert based.alarms.clear("entropy")
    assert [based.alarms.promotion_held(each) for each in (0, made)] == [False, True]
    assert based.of_policy(made).alarms.clear("entropy")
    assert not based.alarms.promotion_held(made)
