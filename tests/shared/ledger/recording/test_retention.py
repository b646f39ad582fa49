from typing import Any

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, experience, fill, ids, published
from tests.factories import feedback as heard
from tests.shared.retaining import EVERYTHING, IN_STATE, NOW, OLD, column, everything, in_work, trained
from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording import retention
from tuneloop.shared.ledger.recording.retention import bounds_of, bounds_of_tenants
from tuneloop.shared.ledger.storage.database import Transactions
from tuneloop.shared.ledger.storage.schema import exchanges, experiences, feedback
from tuneloop.shared.settings.settings import Settings


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, clock=lambda: NOW)


@pytest.mark.parametrize("state", IN_STATE, ids=str)
def test_what_is_older_than_its_bound_goes_with_all_that_belongs_to_it(
    ledger: Ledger, engine: Engine, state: State
) -> None:
    IN_STATE[state](ledger, received_at=OLD)
    assert ledger.reports.counts()[state] == 1
    assert ledger.retention.purge({state: 101.0}).experiences == {state: 0}
    assert ledger.retention.purge(EVERYTHING | {state: 101.0}).experiences[state] == 0, (
        "each state has a bound of its own"
    )
    assert ledger.retention.purge({state: 99.0}, dry_run=True).experiences == {state: 1}
    assert ledger.reports.counts()[state] == 1
    assert ledger.retention.purge({state: 99.0}).experiences == {state: 1}
    left = everything(engine)
    assert (left["exchanges"], left["experiences"], left["feedback"]) == ([], [], [])
    assert ledger.reports.imbalance() == []


def test_a_tenant_may_have_bounds_of_its_own(ledger: Ledger, engine: Engine) -> None:
    for tenant in ("acme", "globex", "other"):
        said = heard(tenant=tenant, msg_id=f"no reply of {tenant}", received_at=OLD)
        ledger.recording.record([exchange(tenant=tenant, received_at=OLD), said])
    retention = {"recorded": 101.0, "dropped": 7.0}
    tenants = {"acme": {"retention": {"recorded": 99.0}}, "globex": {"retention": {"recorded": None}}, "other": {}}
    settings = Settings.model_validate({"model": {"model_path": "x"}, "retention": retention, "tenants": tenants})
    of_tenants = bounds_of_tenants(settings)
    assert of_tenants == {"acme": {State.RECORDED: 99.0, State.DROPPED: 7.0}, "globex": {State.DROPPED: 7.0}}
    bounds = bounds_of(settings.retention)
    told = ledger.retention.purge(bounds, of_tenants=of_tenants, dry_run=True)
    assert told == ledger.retention.purge(bounds, of_tenants=of_tenants)
    assert (told.experiences[State.RECORDED], told.parked) == (1, 1)
    assert column(engine, exchanges.c.tenant) == ["globex", "other"]
    again = ledger.retention.purge({State.RECORDED: 99.0}, of_tenants=of_tenants)
    assert (again.experiences[State.RECORDED], again.parked) == (1, 1)
    assert column(engine, exchanges.c.tenant) == ["globex"]


def test_what_is_in_work_is_never_purged(ledger: Ledger) -> None:
    in_work(ledger, received_at=OLD)
    ledger.retention.purge(EVERYTHING)
    assert (ledger.reports.counts()[State.LEASED], ledger.reports.counts()[State.COMMITTED]) == (1, 1)
    with pytest.raises(ValueError, match="committed, leased wait for the trainer"):
        ledger.retention.purge({State.LEASED: 1.0, State.COMMITTED: 1.0})


def test_the_ledger_adds_up_after_trained_rows_were_purged(ledger: Ledger, engine: Engine) -> None:
    trained(ledger, 3, received_at=OLD)
    trained(ledger, 2, received_at=NOW)
    assert ledger.retention.purge({State.TRAINED: 50.0}).experiences == {State.TRAINED: 3}
    assert [row[6:8] for row in everything(engine)["versions"]] == [(3, 3), (2, 0)]
    assert ledger.reports.imbalance() == []
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE versions SET purged = 2 WHERE version = 1")
    assert len(ledger.reports.imbalance()) == 1


def test_an_exchange_stays_until_its_last_experience_goes(ledger: Ledger, engine: Engine) -> None:
    both = (experience(), experience(choice=1, drop_reason="cut off"))
    said = exchange(received_at=OLD, experiences=both)
    ledger.recording.record([said, heard(msg_id=said.msg_id, choice=0)])
    ledger.retention.purge({State.DROPPED: 50.0})
    assert (len(column(engine, exchanges.c.msg_id)), len(column(engine, feedback.c.id))) == (1, 1)
    ledger.retention.purge({State.REWARDED: 50.0})
    assert (column(engine, exchanges.c.msg_id), column(engine, feedback.c.id)) == ([], [])


def test_many_are_purged_in_portions(ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PORTION", 100)
    fill(engine, 1050)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE experiences SET state = 'expired', reason = 'old', sampled_at = id")
    writes = 0

    class Counting(Transactions):
        def write(self) -> Any:
            nonlocal writes
            writes += 1
            return super().write()

    assert Ledger(engine, clock=lambda: NOW, transactions=Counting).retention.purge(
        {State.EXPIRED: NOW - 1000.5}
    ).experiences == {State.EXPIRED: 1000}
    assert writes == 11
    assert column(engine, experiences.c.id) == list(range(1001, 1051))
    assert len(column(engine, exchanges.c.msg_id)) == 50


def test_a_row_whose_repeat_is_not_trained_yet_stays(engine: Engine) -> None:
    ledger = Ledger(engine, compensate_late=True, clock=lambda: NOW)
    [said] = trained(ledger, received_at=OLD)
    ledger.recording.record([heard(msg_id=said.msg_id, value=0.0)])
    assert ledger.retention.purge({State.TRAINED: 50.0}, dry_run=True).experiences == {State.TRAINED: 0}
    assert ledger.retention.purge({State.TRAINED: 50.0}).experiences == {State.TRAINED: 0}
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=2, publish=published)
    assert ledger.retention.purge({State.TRAINED: 50.0}).experiences == {State.TRAINED: 2}
    assert ledger.reports.imbalance() == []
    assert everything(engine)["feedback"] == []


def test_a_preference_stays_as_long_as_either_reply(ledger: Ledger, engine: Engine) -> None:
    better, worse = exchange(received_at=OLD), exchange(received_at=NOW)
    preference = {"kind": Kind.PREFERENCE, "value": None, "received_at": NOW}
    ledger.recording.record([better, worse, heard(msg_id=better.msg_id, other_msg_id=worse.msg_id, **preference)])
    ledger.retention.purge({State.REWARDED: 50.0})
    assert column(engine, exchanges.c.msg_id) == [worse.msg_id]
    ledger.recording.record([heard(msg_id=worse.msg_id, metric="other", received_at=NOW)])
    assert column(engine, experiences.c.reward) == [0.0], "what made its reward is still there"
    Ledger(engine, clock=lambda: NOW + 100).retention.purge({State.REWARDED: 50.0})
    assert everything(engine)["feedback"] == []


def test_a_preference_that_was_taken_back_does_not_come_back(ledger: Ledger, engine: Engine) -> None:
    better, worse = exchange(received_at=OLD), exchange(received_at=NOW)
    about = {"msg_id": better.msg_id, "value": None}
    preferred = heard(kind=Kind.PREFERENCE, other_msg_id=worse.msg_id, received_at=NOW, **about)
    ledger.recording.record([better, worse, preferred, heard(kind=Kind.RETRACTION, received_at=NOW + 1, **about)])
    assert ledger.reports.counts()[State.RECORDED] == 2
    ledger.retention.purge({State.RECORDED: 50.0})
    ledger.recording.recompute_rewards()
    assert column(engine, exchanges.c.msg_id) == [worse.msg_id]
    assert ledger.reports.counts()[State.RECORDED] == 1


def test_feedback_about_a_run_goes_with_its_last_reply(ledger: Ledger, engine: Engine) -> None:
    for received_at in (OLD, NOW):
        ledger.recording.record([exchange(task_id="t", run_id="r", received_at=received_at)])
    ledger.recording.record([heard(msg_id=None, task_id="t", run_id="r", received_at=NOW)])
    ledger.retention.purge({State.REWARDED: 50.0})
    assert len(column(engine, feedback.c.id)) == 1
    Ledger(engine, clock=lambda: NOW + 100).retention.purge({State.REWARDED: 50.0})
    assert column(engine, feedback.c.id) == []


def test_feedback_whose_reply_never_comes_goes_by_the_bound_of_recorded(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record([heard(received_at=OLD), heard(msg_id="chatcmpl-new", received_at=NOW)])
    assert ledger.retention.purge({State.TRAINED: 50.0}).parked == 0
    assert ledger.retention.purge({State.RECORDED: 50.0}).parked == 1
    assert column(engine, feedback.c.msg_id) == ["chatcmpl-new"]
