"""What waits beyond the backlog's bound is set aside, and only that."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select

from tests.doubles.clock import Clock
from tests.factories import exchange, feedback, ids, published
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.training.batches import Backlog

Trim = Callable[..., Backlog]


@pytest.fixture
def ledger(engine: Engine, clock: Clock) -> Ledger:
    return Ledger(engine, clock=clock)


@pytest.fixture
def trim(ledger: Ledger) -> Trim:
    epoch = ledger.training.take_epoch("trainer")
    return lambda most, **policy: ledger.training.trim(epoch, BatchRules(max_backlog=most, **policy))


def give(ledger: Ledger, count: int = 1, *, source: str | None = None, **but: Any) -> None:
    for _ in range(count):
        said = exchange(**but)
        ledger.recording.record([said, feedback(msg_id=said.msg_id, tenant=said.tenant, source=source)])
        ledger.recording.commit(said.tenant)


def in_state(engine: Engine, state: State) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(experiences).where(experiences.c.state == state)))


def test_the_oldest_beyond_the_bound_expire_with_the_reason(ledger: Ledger, engine: Engine, trim: Trim) -> None:
    give(ledger, 5)
    assert trim(3) == Backlog(waiting=3, set_aside=2)
    assert {row.id: row.reason for row in in_state(engine, State.EXPIRED)} == dict.fromkeys(
        (1, 2), "more than 3 experiences waited: buffer.max_backlog"
    )
    assert trim(3) == Backlog(waiting=3, set_aside=0)


def test_without_a_bound_and_for_methods_that_learn_from_any_reply_all_stay(ledger: Ledger, trim: Trim) -> None:
    give(ledger, 5)
    assert trim(None) == trim(3, any_reply=True) == Backlog(waiting=5, set_aside=0)


def test_the_lowest_priority_expires_first(ledger: Ledger, engine: Engine, trim: Trim) -> None:
    for priority in (2.0, 0.0, 1.0, 0.0):
        give(ledger, priority=priority)
    trim(2, order="priority")
    assert [row.id for row in in_state(engine, State.COMMITTED)] == [1, 3]


def test_a_tenant_with_little_loses_nothing_to_a_loud_one(ledger: Ledger, engine: Engine, trim: Trim) -> None:
    give(ledger, 2, tenant="quiet")
    give(ledger, 20, tenant="loud")
    trim(6)
    assert Counter(row.tenant for row in in_state(engine, State.COMMITTED)) == {"loud": 4, "quiet": 2}


def test_groups_expire_whole_and_those_that_wait_for_others_stay(ledger: Ledger, engine: Engine, trim: Trim) -> None:
    for task, runs in {"a": "12", "b": "12", "c": "12", "open": "1"}.items():
        for run in runs:
            give(ledger, task_id=task, run_id=run)
    policy = {"group_by": "task", "group_size": 2}
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.training.lease(epoch, 99, BatchRules(**policy)) == []  # gathered, but too few for a batch
    trimmed = ledger.training.trim(epoch, BatchRules(max_backlog=3, **policy))
    assert trimmed == Backlog(waiting=5, set_aside=2)
    assert [row.task_id for row in in_state(engine, State.EXPIRED)] == ["a", "a"]


def test_what_is_leased_is_not_set_aside(ledger: Ledger, engine: Engine) -> None:
    give(ledger, 5)
    epoch = ledger.training.take_epoch("trainer")
    held = ids(ledger.training.lease(epoch, 2, BatchRules()))
    assert ledger.training.trim(epoch, BatchRules(max_backlog=1)) == Backlog(waiting=1, set_aside=2)
    assert [row.id for row in in_state(engine, State.LEASED)] == held


def waits_at_saturation(ledger: Ledger, clock: Clock, policy: BatchRules, *, batches: int) -> list[float]:
    """For each batch of 4, trained in a second in which 40 come, how long the feedback of its oldest waited."""
    epoch = ledger.training.take_epoch("trainer")
    waits: list[float] = []
    for step in range(1, batches + 1):
        said = [exchange(received_at=clock.now) for _ in range(40)]
        ledger.recording.record([*said, *(feedback(msg_id=each.msg_id, received_at=clock.now) for each in said)])
        ledger.recording.commit("acme")
        clock.now += 1.0
        batch = ids(ledger.training.lease(epoch, 4, policy))
        version = ledger.training.register(epoch, batch, step=step, publish=published)
        with ledger.transactions.engine.connect() as connection:
            trained = experiences.c.trained_version == version
            rows = connection.execute(select(experiences.c.rewarded_at).where(trained)).scalars().all()
        waits.append(clock.now - min(rows))
        ledger.training.trim(epoch, policy)
    return waits


def test_feedback_stays_fresh_when_ten_times_more_comes_in_than_is_trained(ledger: Ledger, clock: Clock) -> None:
    waits = waits_at_saturation(ledger, clock, BatchRules(max_backlog=8 * 4), batches=30)
    assert max(waits[5:]) <= 2.0
