"""Replies that are not samples of the policy: on the same road as all, taken by methods that learn from any reply."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience, feedback
from tests.shared.ledger.reading import give
from tuneloop.shared.experience import Sample, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences

Take = Callable[..., list[Sample]]

NUCLEUS = (experience(unsampled="sampling:top_p"),)


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def ledger(engine: Engine, now: list[float]) -> Ledger:
    return Ledger(engine, clock=lambda: now[0])


@pytest.fixture
def take(ledger: Ledger) -> Take:
    epoch = ledger.training.take_epoch("trainer")
    return lambda size, **policy: ledger.training.lease(epoch, size, BatchRules(**policy))


def rows(engine: Engine) -> list[tuple[str, str | None, str | None]]:
    with engine.connect() as connection:
        columns = (experiences.c.state, experiences.c.reason, experiences.c.unsampled)
        return [(*row,) for row in connection.execute(select(*columns).order_by(experiences.c.id))]


DROPPED = (State.DROPPED, "sampling:top_p", "sampling:top_p")


def test_it_is_recorded_rewarded_and_committed_like_others(ledger: Ledger, engine: Engine) -> None:
    said = exchange(experiences=NUCLEUS)
    for records, state in (([said], State.RECORDED), ([feedback(msg_id=said.msg_id)], State.REWARDED)):
        ledger.recording.record(records)
        assert rows(engine) == [(state, None, "sampling:top_p")]
    assert ledger.recording.commit("acme") == 1
    assert rows(engine) == [(State.COMMITTED, None, "sampling:top_p")]


@pytest.mark.parametrize("group_by", ["none", "run"])
def test_a_method_that_learns_from_any_reply_gets_it_with_the_mark(
    ledger: Ledger, take: Take, engine: Engine, group_by: str
) -> None:
    give(ledger, experiences=NUCLEUS)
    give(ledger)
    batch = take(2, any_reply=True, group_by=group_by)
    assert [sample.unsampled for sample in batch] == ["sampling:top_p", None]
    assert [state for state, *_ in rows(engine)] == [State.LEASED] * 2


@pytest.mark.parametrize("order", ["oldest", "freshest", "priority"])
def test_any_other_method_never_gets_it_and_it_does_not_stand_in_the_way(
    ledger: Ledger, take: Take, engine: Engine, order: str
) -> None:
    for _ in range(3):
        give(ledger, experiences=NUCLEUS, priority=5.0)
    plain = give(ledger)
    assert [sample.id for sample in take(1, order=order)] == [4]
    assert rows(engine) == [DROPPED] * 3 + [(State.LEASED, None, None)]
    with engine.connect() as connection:
        found = connection.execute(select(experiences.c.msg_id).where(experiences.c.state == State.LEASED))
        assert found.scalars().all() == [plain]


def test_a_group_does_not_wait_for_it_where_it_is_not_taken(ledger: Ledger, take: Take) -> None:
    for run in "12":
        give(ledger, task_id="t", run_id=run)
    ledger.recording.record([exchange(task_id="t", run_id="2", experiences=NUCLEUS)])
    assert take(1, group_by="task", group_size=2, any_reply=True) == []
    assert len(take(1, group_by="task", group_size=2)) == 2


@pytest.mark.parametrize(("any_reply", "claimable"), [(True, 2), (False, 1)])
def test_the_facts_count_what_the_trainer_takes(ledger: Ledger, any_reply: bool, claimable: int) -> None:
    give(ledger, experiences=NUCLEUS)
    give(ledger)
    ledger.recording.record([exchange(experiences=NUCLEUS)])
    facts = ledger.reports.facts(BatchRules(any_reply=any_reply, max_staleness=9))
    assert (facts.claimable, facts.too_old, facts.unsampled) == (claimable, 0, 0 if any_reply else 2)
