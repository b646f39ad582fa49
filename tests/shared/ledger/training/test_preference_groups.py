"""`buffer.group_by: preference`: replies that preferences name together are trained on together."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience, feedback, fill, ids, published
from tests.shared.ledger.reading import give
from tests.shared.ledger.training.test_run_results import ON_POSTGRESQL, between
from tuneloop.shared.experience import Feedback, Kind, Sample, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.training.groups import standing_preferences

Take = Callable[..., list[Sample]]


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def ledger(engine: Engine, now: list[float]) -> Ledger:
    return Ledger(engine, clock=lambda: now[0])


@pytest.fixture
def take(ledger: Ledger) -> Take:
    epoch = ledger.training.take_epoch("trainer")
    policy = BatchRules(group_by="preference", any_reply=True)
    return lambda size=1, **but: ledger.training.lease(epoch, size, policy._replace(**but))


def preferred(better: str, worse: str, **but: Any) -> Feedback:
    fields = {"msg_id": better, "kind": Kind.PREFERENCE, "metric": "preference", "value": None, "other_msg_id": worse}
    return feedback(**fields | but)


def names(samples: list[Sample]) -> list[str]:
    return [sample.msg_id for sample in samples]


def aside(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        columns = (experiences.c.msg_id, experiences.c.reason)
        return {name: why for name, why in connection.execute(select(*columns)) if why is not None}


def test_the_two_replies_of_a_preference_are_a_group(ledger: Ledger, take: Take) -> None:
    a, b, c = (give(ledger) for _ in range(3))
    ledger.recording.record([preferred(c, a)])
    batch = take()
    assert names(batch) == [a, c]
    assert {sample.group_id for sample in batch} == {1}
    assert take() == []
    assert b not in names(batch)


@ON_POSTGRESQL
@pytest.mark.parametrize("grouped", [0, 2])
def test_one_that_is_taken_back_while_they_are_joined_leaves_the_others_for_the_next_look(
    ledger: Ledger, engine: Engine, take: Take, grouped: int
) -> None:
    a, b, c = (give(ledger) for _ in range(3))
    ledger.recording.record([preferred(a, b)] if grouped else [])
    assert take(9) == []  # gathered, but too few for a batch
    ledger.recording.record([preferred(a, b), preferred(a, c)])
    taken_back = [feedback(msg_id=c, kind="retraction", value=None)]
    between(engine, "ORDER BY experiences.id FOR UPDATE", lambda: ledger.recording.record(taken_back))
    assert len(take()) == grouped
    ledger.training.release(1)
    ledger.recording.record([feedback(msg_id=c)])
    ledger.recording.commit("acme")
    assert names(take()) == [a, b, c]


def test_it_waits_until_both_are_committed(ledger: Ledger, take: Take) -> None:
    a, b = give(ledger), give(ledger, commit=False)
    ledger.recording.record([preferred(a, b)])
    assert take() == []
    ledger.recording.commit("acme")
    assert names(take()) == [a, b]


@pytest.mark.parametrize("early", ["recorded", "not there"])
def test_it_waits_for_a_reply_that_has_no_reward_or_is_not_there_yet(ledger: Ledger, take: Take, early: str) -> None:
    a, other = give(ledger), exchange()
    ledger.recording.record([preferred(a, other.msg_id), *([other] if early == "recorded" else [])])
    assert take() == []
    ledger.recording.record([other, feedback(msg_id=other.msg_id)])
    ledger.recording.commit("acme")
    assert names(take()) == [a, other.msg_id]


def test_preferences_that_share_a_reply_make_one_group(ledger: Ledger, take: Take) -> None:
    a, b, c, d, e = (give(ledger) for _ in range(5))
    ledger.recording.record([preferred(a, b), preferred(c, d), preferred(d, b), preferred(e, e)])
    assert names(take()) == [a, b, c, d]


def test_a_chain_of_preferences_makes_groups_of_bounded_size(
    ledger: Ledger, engine: Engine, take: Take, now: list[float]
) -> None:
    chain = [give(ledger) for _ in range(100)]
    ledger.recording.record([preferred(*pair) for pair in pairwise(chain)])
    assert [names(take()) for _ in range(4)] == [chain[:32], chain[32:64], chain[64:96], chain[96:]]
    best, *others = (give(ledger) for _ in range(40))
    ledger.recording.record([preferred(best, each) for each in others])
    assert names(take()) == [best, *others[:31]]
    now[0] += 3601.0
    assert take() == []
    assert aside(engine) == dict.fromkeys(others[31:], "alone in its preference 3600 s after it was committed")
    many = [give(ledger, experiences=tuple(experience(choice=choice) for choice in range(20))) for _ in range(2)]
    ledger.recording.record([preferred(*many)])
    assert len(take()) == 40, "one preference connects all that it names"


def test_such_a_group_waits_for_all_of_them(ledger: Ledger, take: Take, now: list[float]) -> None:
    a, b, c = give(ledger), give(ledger), give(ledger, commit=False)
    ledger.recording.record([preferred(a, b), preferred(c, b)])
    assert take() == []
    now[0] += 3600.0
    assert names(take()) == [a, b]
    ledger.recording.commit("acme")
    now[0] += 3600.0
    assert take() == []


def test_a_preference_names_choices(ledger: Ledger, take: Take) -> None:
    one = give(ledger, experiences=tuple(experience(choice=choice) for choice in range(3)))
    ledger.recording.record([preferred(one, one, choice=0, other_choice=2)])
    assert [sample.choice for sample in take()] == [0, 2]


def test_what_no_preference_names_is_set_aside_after_the_timeout(
    ledger: Ledger, engine: Engine, take: Take, now: list[float]
) -> None:
    a = give(ledger)
    now[0] += 3599.0
    assert take() == []
    assert aside(engine) == {}
    now[0] += 2.0
    assert take() == []
    assert aside(engine) == {a: "in no preference 3600 s after it was committed"}


def test_a_preference_over_what_was_trained_on_makes_no_group(
    ledger: Ledger, engine: Engine, take: Take, now: list[float]
) -> None:
    gone = give(ledger)
    epoch = ledger.training.take_epoch("one")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=1, publish=published)
    a = give(ledger)
    ledger.recording.record([preferred(a, gone)])
    epoch, policy = ledger.training.take_epoch("two"), BatchRules(group_by="preference", any_reply=True)
    assert ledger.training.lease(epoch, 1, policy) == []
    now[0] += 3600.0
    assert ledger.training.lease(epoch, 1, policy) == []
    assert aside(engine) == {a: "alone in its preference 3600 s after it was committed"}


def test_a_preference_that_was_taken_back_groups_nothing(ledger: Ledger, take: Take) -> None:
    a, b = give(ledger), give(ledger)
    back = {"kind": Kind.RETRACTION, "metric": "preference", "value": None, "source": "ann"}
    ledger.recording.record([preferred(a, b, source="ann"), feedback(msg_id=a, **back)])
    assert take() == []
    ledger.recording.record([preferred(b, a, source="ann")])
    assert names(take()) == [a, b]


def test_one_that_comes_before_its_group_is_taken_widens_it(ledger: Ledger, take: Take) -> None:
    c, a, b = (give(ledger) for _ in range(3))
    ledger.recording.record([preferred(a, b)])
    assert take(9) == []  # gathered, but too few for a batch
    ledger.recording.record([preferred(a, c)])
    batch = take(3)
    assert names(batch) == [c, a, b]
    assert {sample.group_id for sample in batch} == {1}
    assert ledger.reports.audit() == []


def test_replies_of_two_tenants_are_no_group(ledger: Ledger, take: Take) -> None:
    a, b = give(ledger), give(ledger, tenant="other")
    ledger.recording.record([preferred(a, b)])
    assert take() == []


def test_what_is_no_sample_of_the_policy_is_no_part_of_it_where_it_is_not_taken(ledger: Ledger, take: Take) -> None:
    unsampled = (experience(unsampled="sampling:top_p"),)
    a, b, c = give(ledger), give(ledger, experiences=unsampled), give(ledger)
    waits = exchange(experiences=unsampled)
    ledger.recording.record([waits, preferred(a, b), preferred(a, c), preferred(waits.msg_id, c)])
    assert names(take(any_reply=False)) == [a, c]
    assert ledger.reports.counts()[State.DROPPED] == 1


def test_a_retracted_reward_dissolves_the_group(ledger: Ledger, take: Take) -> None:
    a, b = give(ledger), give(ledger)
    ledger.recording.record([preferred(a, b)])
    assert take(9) == []
    ledger.recording.record([feedback(msg_id=a, kind=Kind.RETRACTION, value=None)])
    assert take() == []
    ledger.recording.record([feedback(msg_id=a)])
    ledger.recording.commit("acme")
    assert names(take()) == [a, b]


def test_what_preferences_there_are_is_looked_up_in_indexes(engine: Engine) -> None:
    """However much feedback there is of other kinds, and of other replies."""
    fill(engine, 2000)
    asked = list[str]()
    with engine.connect() as connection:

        class Listening:
            def execute(self, query: Any) -> Iterator[Any]:
                sql = query.compile(engine, compile_kwargs={"literal_binds": True})
                explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
                asked.append(str(connection.exec_driver_sql(f"{explain} {sql}").all()))
                return iter(())

        assert standing_preferences(Listening(), {"chatcmpl-1"}) == []  # type: ignore[arg-type]
    assert len(asked) == 2
    assert "ix_feedback_msg_id_received_at" in asked[0] or "ix_feedback_other_msg_id" in asked[0]
    assert "ix_feedback_other_msg_id" in asked[1]
    assert not any("SCAN" in plan or "Seq Scan" in plan for plan in asked)
