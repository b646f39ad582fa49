"""Which rows the next batch is made of."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text

from tests.doubles.clock import Clock
from tests.explorer.running import eventually
from tests.factories import exchange, experience, feedback, fill, ids, published, trained
from tests.shared.ledger.reading import give
from tests.shared.ledger.training.test_run_results import ON_POSTGRESQL, between
from tuneloop.shared.experience import Sample, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.training.batches import edited_rows, next_groups, next_of, tenants_in, unsampled_rows


@pytest.fixture
def ledger(engine: Engine, clock: Clock) -> Ledger:
    return Ledger(engine, clock=clock)


@pytest.fixture
def take(ledger: Ledger) -> Callable[..., list[Sample]]:
    epoch = ledger.training.take_epoch("trainer")
    return lambda size, **policy: ledger.training.lease(epoch, size, BatchRules(**policy))


def states(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.state))
        return {row.msg_id: row.state for row in rows}


def reasons(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(select(experiences.c.reason).where(experiences.c.reason.is_not(None))).scalars())


Take = Callable[..., list[Sample]]


# Orders.


def test_the_oldest_come_first_unless_the_policy_says_otherwise(ledger: Ledger, take: Take) -> None:
    for _ in range(4):
        give(ledger)
    assert ids(take(2)) == [1, 2]


def test_the_freshest_come_first_if_the_policy_says_so(ledger: Ledger, take: Take) -> None:
    for _ in range(4):
        give(ledger)
    assert ids(take(2, order="freshest")) == [3, 4]


def test_the_highest_priority_comes_first_and_among_equals_the_oldest(ledger: Ledger, take: Take) -> None:
    for priority in (0.0, 2.0, -1.0, 2.0, 1.0):
        give(ledger, priority=priority)
    assert ids(take(3, order="priority")) == [2, 4, 5]
    assert ids(take(1, order="priority")) == [1]


@pytest.mark.parametrize("order", ["oldest", "freshest", "priority"])
def test_each_tenant_gets_the_same_share_and_what_one_leaves_goes_to_the_others(
    ledger: Ledger, take: Take, order: str
) -> None:
    for tenant, count in {"loud": 20, "quiet": 2, "middle": 5}.items():
        for _ in range(count):
            give(ledger, tenant=tenant)
    batch = take(9, order=order)
    assert Counter(sample.tenant for sample in batch) == {"loud": 4, "middle": 3, "quiet": 2}


# Bounds.


def test_what_was_sampled_too_many_versions_ago_expires_with_the_reason(ledger: Ledger, engine: Engine) -> None:
    for _ in range(3):
        trained(ledger)
    old = give(ledger, experiences=(experience(version_min=1, version_max=3),))
    young = give(ledger, experiences=(experience(version_min=2, version_max=2),))
    batch = ledger.training.lease(ledger.training.take_epoch("next"), 1, BatchRules(max_staleness=1))
    assert len(batch) == 1
    assert (states(engine)[old], states(engine)[young]) == (State.EXPIRED, State.LEASED)
    assert reasons(engine) == {"sampled more than 1 versions before 3"}


def test_a_group_of_which_a_part_is_too_old_expires_whole(ledger: Ledger, engine: Engine, take: Take) -> None:
    old = give(ledger, task_id="t", run_id="1")
    young = give(ledger, task_id="t", run_id="2", experiences=(experience(version_min=1, version_max=1),))
    assert take(9, group_by="task", group_size=2) == []  # gathered, but too few for a batch
    assert take(1, group_by="task", group_size=2, max_staleness=-1) == []
    assert states(engine) == {old: State.EXPIRED, young: State.EXPIRED}


# Groups.


def test_a_group_is_gathered_across_commits_and_taken_whole(ledger: Ledger, take: Take, clock: Clock) -> None:
    give(ledger, task_id="t", run_id="1")
    clock.now += 3000.0
    give(ledger, task_id="u", run_id="1")
    assert take(1, group_by="task", group_size=2) == []
    give(ledger, task_id="t", run_id="2")
    batch = take(1, group_by="task", group_size=2)
    assert [(sample.task_id, sample.run_id, sample.group_id) for sample in batch] == [("t", "1", 1), ("t", "2", 1)]


def test_a_batch_of_groups_has_at_least_its_size(ledger: Ledger, take: Take) -> None:
    for task in ("a", "b", "c"):
        for run in ("1", "2", "3"):
            give(ledger, task_id=task, run_id=run)
    assert [sample.task_id for sample in take(4, group_by="task", group_size=3)] == ["a"] * 3 + ["b"] * 3
    assert take(4, group_by="task", group_size=3) == []
    assert len(take(3, group_by="task", group_size=3)) == 3


def test_a_group_waits_for_its_replies_that_have_no_feedback_yet(ledger: Ledger, take: Take) -> None:
    for run in ("1", "2"):
        give(ledger, task_id="t", run_id=run)
    waiting = exchange(task_id="t", run_id="2")
    ledger.recording.record([waiting])
    assert take(1, group_by="task", group_size=2) == []
    ledger.recording.record([feedback(msg_id=waiting.msg_id)])
    assert take(1, group_by="task", group_size=2) == []
    ledger.recording.commit("acme")
    assert len(take(1, group_by="task", group_size=2)) == 3


def test_after_the_timeout_a_group_is_what_there_is(ledger: Ledger, take: Take, clock: Clock) -> None:
    for run in ("1", "2"):
        give(ledger, task_id="t", run_id=run)
    clock.now += 3599.0
    assert take(1, group_by="task") == []
    clock.now += 2.0
    assert len(take(1, group_by="task")) == 2


@pytest.mark.parametrize("group_by", ["none", "task"])
def test_after_the_batch_timeout_a_batch_is_what_there_is(
    ledger: Ledger, take: Take, clock: Clock, group_by: str
) -> None:
    policy = {"group_by": group_by, "group_size": 2, "batch_timeout": 5.0}
    for run in "12":
        give(ledger, task_id="a", run_id=run)
    clock.now += 4.9
    give(ledger, task_id="a", run_id="3")
    assert take(4, **policy) == []
    clock.now += 0.1
    assert ids(take(4, **policy | {"batch_timeout": None})) == []
    assert ids(take(4, **policy)) == [1, 2, 3]
    assert take(4, **policy) == []


def test_a_lone_run_never_trains_as_a_group_but_expires(
    ledger: Ledger, engine: Engine, take: Take, clock: Clock
) -> None:
    calls = [give(ledger, task_id="t", run_id="1") for _ in range(3)]
    clock.now += 3601.0
    assert take(1, group_by="task") == []
    assert states(engine) == dict.fromkeys(calls, State.EXPIRED)
    assert reasons(engine) == {"alone in its group 3600 s after it was committed"}


def test_a_group_that_is_not_whole_expires_where_the_settings_say_so(
    ledger: Ledger, engine: Engine, take: Take, clock: Clock
) -> None:
    policy = {"group_by": "task", "group_size": 4, "least_runs": 4}
    part = [give(ledger, task_id="part", run_id=run) for run in "12"]
    assert take(1, **policy) == []
    clock.now += 3601.0
    whole = [give(ledger, task_id="whole", run_id=run) for run in "1234"]
    assert len(take(1, **policy)) == len(whole)
    assert [states(engine)[each] for each in part] == [State.EXPIRED] * 2
    assert reasons(engine) == {"2 of the 4 runs of its group 3600 s after it was committed"}


def test_the_choices_of_a_reply_that_names_no_task_are_a_group(ledger: Ledger, take: Take) -> None:
    give(ledger, experiences=tuple(experience(choice=choice) for choice in range(4)))
    assert len(take(1, group_by="task", group_size=4)) == 4


def test_tenants_with_the_same_task_are_no_group(ledger: Ledger, take: Take) -> None:
    for tenant in ("a", "b"):
        give(ledger, tenant=tenant, task_id="t", run_id=tenant)
    assert take(1, group_by="task", group_size=2) == []


def test_a_trajectory_is_taken_whole(ledger: Ledger, take: Take) -> None:
    for run in ("1", "2", "1", "1"):
        give(ledger, task_id="t", run_id=run)
    assert [sample.run_id for sample in take(2, group_by="run")] == ["1", "1", "1"]
    assert [sample.run_id for sample in take(1, group_by="run")] == ["2"]


@ON_POSTGRESQL
def test_a_lease_and_new_feedback_about_rows_of_two_groups_do_not_wait_for_each_other(
    ledger: Ledger, take: Take, engine: Engine
) -> None:
    for run_id in ("1", "2"):
        for task_id in ("a", "b"):
            give(ledger, task_id=task_id, run_id=run_id)
    assert take(9, group_by="task", group_size=2) == []  # gathered: 1 and 3, 2 and 4
    row = select(experiences.c.id).with_for_update(nowait=True)
    waiting = select(func.count()).where(text("NOT granted")).select_from(text("pg_locks"))
    with ThreadPoolExecutor(1) as pool, engine.connect() as recording:
        recording.execute(row.where(experiences.c.id == 2))
        leasing = pool.submit(take, 4, group_by="task", group_size=2)
        eventually(lambda: recording.execute(waiting).scalar_one() > 0)
        recording.execute(row.where(experiences.c.id == 3))
        recording.rollback()
        assert len(leasing.result()) == 4


@ON_POSTGRESQL
def test_a_lease_that_a_deadlock_with_new_feedback_ends_is_done_again(
    ledger: Ledger, take: Take, engine: Engine, clock: Clock
) -> None:
    for run_id in ("1", "2"):
        young = (experience(version_min=1, version_max=1),)
        give(ledger, task_id="t", run_id=run_id, received_at=clock.now, experiences=young)
    give(ledger, received_at=clock.now)
    old, policy = 3, {"group_by": "task", "group_size": 2}
    assert take(9, **policy) == []  # gathered: 1 and 2
    row = select(experiences.c.id).with_for_update()
    waiting = select(func.count()).where(text("NOT granted")).select_from(text("pg_locks"))
    with ThreadPoolExecutor(1) as pool, engine.connect() as recording:
        recording.execute(text("SET LOCAL deadlock_timeout = '60s'"))  # so that it is the other that is ended
        recording.execute(row.where(experiences.c.id == 2))
        leasing = pool.submit(take, 2, max_staleness=-1, **policy)
        eventually(lambda: recording.execute(waiting).scalar_one() > 0)
        recording.execute(row.where(experiences.c.id == old))  # which has expired in what is waiting for us
        recording.rollback()
        assert ids(leasing.result()) == [1, 2]


def test_groups_are_shared_out_among_the_tenants(ledger: Ledger, take: Take) -> None:
    for tenant, tasks in {"loud": "abcd", "quiet": "e"}.items():
        for task in tasks:
            for run in "12":
                give(ledger, tenant=tenant, task_id=task, run_id=run)
    assert {sample.task_id for sample in take(4, group_by="task", group_size=2)} == {"a", "e"}
    assert {sample.task_id for sample in take(2, group_by="task", group_size=2, order="freshest")} == {"d"}


def test_a_group_that_loses_a_member_is_gathered_anew(ledger: Ledger, engine: Engine, take: Take, clock: Clock) -> None:
    first, second = (give(ledger, task_id="t", run_id=run) for run in "12")
    assert take(9, group_by="task", group_size=2) == []
    ledger.recording.record([feedback(msg_id=first, kind="retraction", value=None)])
    assert states(engine) == {first: State.RECORDED, second: State.COMMITTED}
    assert take(1, group_by="task", group_size=2) == []
    clock.now += 3601.0
    take(1, group_by="task", group_size=2)
    assert states(engine)[second] == State.EXPIRED


@ON_POSTGRESQL
def test_a_group_of_which_a_member_is_taken_back_while_it_is_gathered_waits_for_the_next_look(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    first, second = (give(ledger, task_id="t", run_id=run) for run in "12")
    retraction = feedback(msg_id=first, kind="retraction", value=None)
    between(engine, "ORDER BY experiences.id FOR UPDATE", lambda: ledger.recording.record([retraction]))
    assert take(1, group_by="task", group_size=2) == []
    assert states(engine) == {first: State.RECORDED, second: State.COMMITTED}
    ledger.recording.record([feedback(msg_id=first, value=0.0)])
    ledger.recording.commit("acme")
    assert ids(take(1, group_by="task", group_size=2)) == [1, 2]


def test_a_group_that_was_given_back_is_taken_again(ledger: Ledger) -> None:
    for run in "12":
        give(ledger, task_id="t", run_id=run)
    policy = BatchRules(group_by="task", group_size=2)
    epoch = ledger.training.take_epoch("one")
    assert len(ledger.training.lease(epoch, 1, policy)) == 2
    epoch = ledger.training.take_epoch("two")
    batch = ledger.training.lease(epoch, 1, policy)
    assert len(batch) == 2
    assert ledger.training.register(epoch, ids(batch), step=1, publish=published) == 1


# Cost.


def plan_of(engine: Engine, query: Any) -> str:
    sql = query.compile(engine, compile_kwargs={"literal_binds": True})
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    with engine.connect() as connection:
        return str(connection.exec_driver_sql(f"{explain} {sql}").all())


def indexed_claims() -> Iterator[tuple[Any, str]]:
    """Every way to choose what is claimed, and the index that has it in its order."""
    for any_reply in (False, True):
        for order, index in (
            ("oldest", "ix_experiences_committed"),
            ("freshest", "ix_experiences_committed"),
            ("priority", "ix_experiences_committed_by_priority"),
        ):
            yield next_of("acme", BatchRules(order=order, any_reply=any_reply), 512), index
    for order in ("oldest", "freshest"):
        yield next_groups("acme", BatchRules(order=order), 512), "ix_experiences_grouped"


def test_a_claim_reads_an_index_in_its_order_whatever_else_waits(engine: Engine) -> None:
    fill(engine, 20_000)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE experiences SET state='dropped', reason='' WHERE id <= 14000 OR id > 16000")
        connection.exec_driver_sql("UPDATE experiences SET group_id = id WHERE id > 15000")
    connection = engine.raw_connection()  # in no transaction
    connection.cursor().execute("VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE")
    connection.close()
    assert "ix_experiences_committed" in plan_of(engine, tenants_in(BatchRules(), engine.dialect.name))
    for statement, index in ((unsampled_rows, "unsampled"), (edited_rows, "edited")):
        assert f"ix_experiences_{index}" in plan_of(engine, statement(BatchRules(), experiences.c.id))
    for query, index in indexed_claims():
        plan = plan_of(engine, query)
        assert index in plan
        assert not [word for word in ("Sort", "TEMP B-TREE") if word in plan]
