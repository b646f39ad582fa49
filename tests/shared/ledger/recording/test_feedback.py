"""What the ledger makes of feedback as people give it: early, late, again, corrected, taken back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, delete, select

from tests.factories import committed, exchange, experience, feedback, ids, leased, published, rewarded, trained
from tests.shared.ledger.reading import rewards, rows
from tuneloop.shared.experience import Feedback, Kind, Outcome, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import exchanges, experiences
from tuneloop.shared.ledger.storage.schema import feedback as feedback_table
from tuneloop.shared.settings.feedback import RewardRule

LATE = 1e9


def states(engine: Engine) -> list[str]:
    return [row.state for row in rows(engine)]


def events(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(feedback_table).order_by(feedback_table.c.id)))


def hear(ledger: Ledger, **but: Any) -> Outcome:
    event = feedback(**{"call_id": "this call"} | but)
    return ledger.recording.record([event]).outcomes[event.event_id]


def outcome(engine: Engine, event_id: str) -> str:
    return next(each.outcome for each in events(engine) if each.event_id == event_id)


def run_of(name: str, **but: Any) -> dict[str, Any]:
    return {"msg_id": None, "task_id": "task", "run_id": name, **but}


def retraction(**but: Any) -> dict[str, Any]:
    return {"kind": Kind.RETRACTION, "value": None, **but}


@pytest.fixture
def under(engine: Engine) -> Iterator[Any]:
    def made(ledger: type[Ledger] = Ledger, **rule: Any) -> Ledger:
        options = {name: rule.pop(name) for name in ("compensate_late", "clock") if name in rule}
        return ledger(engine, rule=RewardRule(**{"clip": None, **rule}), **options)

    return made


def test_an_event_is_accepted_once(ledger: Ledger) -> None:
    [said] = [exchange()]
    ledger.recording.record([said])
    assert hear(ledger, msg_id=said.msg_id) == Outcome.ACCEPTED
    assert hear(ledger, msg_id=said.msg_id) == Outcome.DUPLICATE
    assert hear(ledger, msg_id=said.msg_id, value=0.5) == Outcome.ACCEPTED


def test_a_repeated_event_is_a_duplicate_also_when_something_else_was_said_since(
    ledger: Ledger, engine: Engine
) -> None:
    said = exchange()
    ledger.recording.record([said])
    first = {"event_id": "by its key", "msg_id": said.msg_id, "value": 0.0}
    assert hear(ledger, **first, call_id="first") == Outcome.ACCEPTED
    assert hear(ledger, **first, call_id="first") == Outcome.ACCEPTED  # the same call, taken once more
    hear(ledger, msg_id=said.msg_id, value=1.0)
    assert hear(ledger, **first) == Outcome.DUPLICATE
    assert rewards(engine) == [1.0]


def test_feedback_waits_for_its_reply_and_is_then_accepted(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    assert hear(ledger, event_id="early", msg_id=said.msg_id, value=0.5) == Outcome.PENDING
    ledger.recording.record([said])
    assert outcome(engine, "early") == Outcome.ACCEPTED
    assert rewards(engine) == [0.5]


def test_feedback_on_a_reply_that_a_restored_database_lost_is_told_to_be_unknown(under: Any) -> None:
    ledger = under(clock=lambda: 1000.0)
    lost, new = (f"chatcmpl-{np.base_repr(1000 * at << 8 * 19, 32).lower():0>40}" for at in (900, 1100))
    assert hear(ledger, msg_id=lost) == Outcome.PENDING
    ledger.restoration.begin_anew(version=1, epoch=1, reason="restored", path=Path("/path"))
    assert hear(ledger, msg_id=lost, value=0.5) == Outcome.UNKNOWN
    assert hear(ledger, msg_id=new) == hear(ledger, **run_of("none")) == Outcome.PENDING


@pytest.mark.parametrize("first", [True, False])
def test_feedback_on_a_trajectory_reaches_its_replies_whichever_came_first(
    ledger: Ledger, engine: Engine, first: bool
) -> None:
    said = [exchange(task_id="task", run_id=run) for run in ("1", "1", "2")]
    heard = feedback(**run_of("1"), value=0.25)
    ledger.recording.record([heard, *said] if first else [*said, heard])
    assert rewards(engine) == [0.25, 0.25, None]


def test_of_feedback_on_a_reply_and_on_its_trajectory_that_on_the_reply_counts(ledger: Ledger, engine: Engine) -> None:
    said = [exchange(task_id="task", run_id="1") for _ in range(2)]
    ledger.recording.record([*said, feedback(**run_of("1"), value=0.0), feedback(msg_id=said[0].msg_id, value=1.0)])
    assert rewards(engine) == [1.0, 0.0]
    hear(ledger, **run_of("1"), value=0.5)
    assert rewards(engine) == [1.0, 0.5]


def test_what_is_offered_again_changes_nothing(ledger: Ledger, engine: Engine) -> None:
    """A group whose transaction was committed before anybody knew; what merely repeated has no row of its own."""
    said, other = exchange(), exchange()
    first, repeated, corrected = (feedback(msg_id=said.msg_id, value=value) for value in (0.0, 0.0, 1.0))
    anothers = feedback(msg_id=other.msg_id, value=0.5, key="another")
    ledger.recording.record([said, other, first], [("a", 1), ("a", 2), ("a", 3)])
    ledger.recording.record([repeated, corrected], [("b", 1), ("b", 2)])
    again = ledger.recording.record([repeated, anothers, corrected], [("b", 1), ("c", 1), ("b", 2)])
    assert rewards(engine) == [1.0, 0.5]
    assert list(again.outcomes.values()) == [Outcome.DUPLICATE, Outcome.ACCEPTED, Outcome.ACCEPTED]
    ledger.recording.record([repeated, corrected])
    assert rewards(engine) == [1.0, 0.5], "what was said earlier is no later word where nobody knows its number"
    assert ledger.recording.taken_numbers(["a", "b", "c", "d"]) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize(
    ("once", "again"),
    [
        ({"value": 1.0}, {"value": 1.0}),
        ({"value": 1.0}, {"value": 0.5}),
        (retraction(), retraction()),
        ({"msg_id": "of another reply"}, {"value": 1.0}),
    ],
)
def test_a_request_that_is_sent_again_does_not_hide_what_is_said_with_it(
    ledger: Ledger, engine: Engine, once: dict[str, Any], again: dict[str, Any]
) -> None:
    said = exchange()
    about, key = {"msg_id": said.msg_id}, {"event_id": "a key"}
    ledger.recording.record([said, feedback(**about | key | once, call_id="once")])
    ledger.recording.record([feedback(**about, value=0.0)])
    ledger.recording.record([feedback(**about | key | again, call_id="twice"), feedback(**about, **again)])
    assert rewards(engine) == [again["value"]]
    assert len(events(engine)) == 3


def test_a_reply_joins_the_trajectory_that_its_feedback_names(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said, feedback(**run_of("1"), value=0.25)])
    ledger.recording.record(
        [feedback(msg_id=said.msg_id, kind=Kind.COMMENT, value=None, text="x", task_id="task", run_id="1")]
    )
    assert rewards(engine) == [0.25]


def test_a_preference_is_for_one_reply_and_against_the_other(under: Any, engine: Engine) -> None:
    ledger = under(weights={"preference": 1.0}, boolean_values=(-1.0, 1.0))
    better, worse = exchange(), exchange(experiences=(experience(choice=0), experience(choice=1)))
    preference = {"kind": Kind.PREFERENCE, "metric": "preference", "value": None}
    of_two = {"msg_id": better.msg_id, "other_msg_id": worse.msg_id, "other_choice": 1, **preference}
    assert hear(ledger, **of_two) == Outcome.PENDING
    ledger.recording.record([better])
    ledger.recording.record([worse])
    assert rewards(engine) == [1.0, None, -1.0]
    hear(ledger, msg_id=better.msg_id, **retraction(metric="preference"))
    assert rewards(engine)[0] is None


def test_all_that_an_event_says_is_kept(ledger: Ledger, engine: Engine) -> None:
    event = feedback(msg_id="x", choice=1, source="rater", occurred_at=5.0, task_id="t", run_id="r", metric="help")
    ledger.recording.record([event])
    [kept] = events(engine)
    for name in set(Feedback.__struct_fields__) - {"stamp", "key"}:
        assert getattr(kept, name) == getattr(event, name)


def test_a_retracted_reward_puts_the_reply_back_also_after_the_commit(ledger: Ledger, engine: Engine) -> None:
    said = [*rewarded(ledger), *committed(ledger)]
    rewarded(ledger)
    for each in said:
        assert hear(ledger, msg_id=each.msg_id, **retraction()) == Outcome.ACCEPTED
    assert states(engine) == [State.RECORDED, State.RECORDED, State.REWARDED]
    assert [(row.reward, row.reward_rule, row.committed_at) for row in rows(engine)][:2] == [(None, None, None)] * 2
    assert hear(ledger, msg_id=said[1].msg_id, value=0.5) == Outcome.ACCEPTED
    assert ledger.recording.commit("acme") == 2


def test_a_retraction_of_one_source_leaves_the_other(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said, feedback(msg_id=said.msg_id, source="ann")])
    ledger.recording.record([feedback(msg_id=said.msg_id, source="judge", value=0.0)])
    assert rewards(engine) == [0.5]
    hear(ledger, msg_id=said.msg_id, source="judge", **retraction())
    assert rewards(engine) == [1.0]


def test_feedback_for_a_leased_reply_is_late_until_the_lease_ends(ledger: Ledger, engine: Engine) -> None:
    epoch, samples = leased(ledger)
    msg_id = rows(engine)[0].msg_id
    assert hear(ledger, event_id="late", msg_id=msg_id, value=-0.5) == Outcome.LATE
    assert rewards(engine) == [1.0]
    ledger.training.take_epoch("the next trainer")
    assert outcome(engine, "late") == Outcome.ACCEPTED
    assert (rewards(engine), states(engine)) == ([-0.5], [State.COMMITTED])
    assert (epoch, len(samples)) == (1, 1)


def test_feedback_after_training_is_late(ledger: Ledger, engine: Engine) -> None:
    trained(ledger)
    msg_id = rows(engine)[0].msg_id
    for said in ({"value": -0.5}, retraction()):
        assert hear(ledger, msg_id=msg_id, **said) == Outcome.LATE
    assert hear(ledger, msg_id=msg_id, kind=Kind.COMMENT, metric="comment", value=None, text="x") == Outcome.ACCEPTED
    assert [(row.reward, row.state) for row in rows(engine)] == [(1.0, State.TRAINED)]


def test_feedback_after_expiry_is_late(ledger: Ledger, engine: Engine) -> None:
    committed(ledger)
    trained(ledger)
    ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules(max_staleness=-1))
    expired = [row for row in rows(engine) if row.state == State.EXPIRED]
    assert expired
    assert hear(ledger, msg_id=expired[0].msg_id, value=0.5) == Outcome.LATE


def test_feedback_after_its_window_is_late_and_does_not_count(under: Any, engine: Engine) -> None:
    ledger = under(attribution_window=10.0, clock=lambda: 115.0)
    said = exchange(received_at=100.0)
    ledger.recording.record([said])
    assert hear(ledger, msg_id=said.msg_id, received_at=110.0, value=0.5) == Outcome.ACCEPTED
    assert hear(ledger, msg_id=said.msg_id, received_at=111.0, value=1.0) == Outcome.LATE
    assert rewards(engine) == [0.5]


def test_a_reply_without_feedback_gets_the_default_with_the_commit_after_its_window(under: Any, engine: Engine) -> None:
    now = [105.0]
    ledger = under(attribution_window=10.0, default=-1.0, clock=lambda: now[0])
    ledger.recording.record([exchange(received_at=100.0), exchange(received_at=100.0, tenant="other")])
    assert ledger.recording.commit("acme") == 0
    now[0] = 111.0
    assert ledger.recording.commit("acme") == 1
    assert rewards(engine) == [-1.0, None]


def test_late_feedback_makes_a_compensating_experience_once(under: Any, engine: Engine) -> None:
    ledger = under(compensate_late=True)
    trained(ledger)
    before = rows(engine)[0]
    heard = feedback(msg_id=before.msg_id, value=-0.5, received_at=LATE)
    for _ in range(3):
        ledger.recording.record([heard])
    [same, copy] = rows(engine)
    assert same == before
    assert (copy.correction, copy.state, copy.reward, copy.blob) == (1, State.REWARDED, -0.5, before.blob)
    assert ledger.recording.commit("acme") == 1
    samples = ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules())
    assert [sample.reward for sample in samples] == [-0.5]


def test_a_compensating_experience_takes_corrections_until_it_is_trained_on(under: Any, engine: Engine) -> None:
    ledger = under(compensate_late=True)
    trained(ledger)
    msg_id = rows(engine)[0].msg_id
    for number, reward in enumerate((-0.5, 0.25, 0.5)):
        hear(ledger, msg_id=msg_id, value=reward, received_at=LATE + number)
    assert rewards(engine) == [1.0, 0.5]
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=2, publish=published)
    hear(ledger, msg_id=msg_id, value=0.75, received_at=LATE + 9)
    assert [(row.correction, row.state, row.reward) for row in rows(engine)] == [
        (0, State.TRAINED, 1.0),
        (1, State.TRAINED, 0.5),
        (2, State.REWARDED, 0.75),
    ]


def test_of_several_choices_those_that_were_trained_on_are_compensated(under: Any, engine: Engine) -> None:
    ledger = under(compensate_late=True)
    said = exchange(task_id="task", run_id="run", experiences=(experience(), experience(choice=1)))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, choice=0, value=1.0)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=1, publish=published)
    assert hear(ledger, msg_id=said.msg_id, value=-0.5) == Outcome.LATE
    assert hear(ledger, msg_id=said.msg_id, value=0.25) == Outcome.ACCEPTED
    assert [(row.choice, row.correction, row.state, row.reward) for row in rows(engine)] == [
        (0, 0, State.TRAINED, 1.0),
        (1, 0, State.REWARDED, 0.25),
        (0, 1, State.REWARDED, 0.25),
    ]


def test_each_choice_is_told_apart(ledger: Ledger) -> None:
    said = exchange(task_id="task", run_id="run", experiences=(experience(), experience(choice=1)))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, choice=0, value=1.0)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=1, publish=published)
    apart = {f"{said.msg_id}:0": Outcome.LATE, f"{said.msg_id}:1": Outcome.ACCEPTED}
    late = [feedback(msg_id=said.msg_id, value=0.5), feedback(**run_of("run")), feedback(msg_id=said.msg_id, choice=0)]
    results = ledger.recording.record([*late, feedback(**run_of("other"))])
    assert results.apart == {late[0].event_id: apart, late[1].event_id: apart}
    assert results.of_runs[late[1].event_id] == []


def test_the_replies_that_take_what_was_said_of_their_run_are_told(ledger: Ledger) -> None:
    said = [exchange(task_id="task", run_id="1", experiences=(experience(), experience(choice=1))) for _ in range(3)]
    heard = feedback(**run_of("1"), value=0.25)
    own = feedback(msg_id=said[1].msg_id, value=1.0)
    comment = feedback(**run_of("1"), kind=Kind.COMMENT, metric="comment", value=None, text="so")
    results = ledger.recording.record([*said, own, heard, comment])
    assert results.of_runs == {heard.event_id: [said[0].msg_id, said[2].msg_id]}
    again = feedback(**run_of("1"), value=0.25)
    assert ledger.recording.record([again]).of_runs == {again.event_id: [said[0].msg_id, said[2].msg_id]}
    assert ledger.recording.record([feedback(**run_of("none"))]).of_runs == {}


@pytest.mark.parametrize("said", [{"value": 1.0, "source": "who agrees"}, retraction()])
def test_late_feedback_that_leaves_no_other_reward_is_not_compensated(
    under: Any, engine: Engine, said: dict[str, Any]
) -> None:
    ledger = under(compensate_late=True)
    trained(ledger)
    assert hear(ledger, msg_id=rows(engine)[0].msg_id, received_at=LATE, **said) == Outcome.LATE
    assert rewards(engine) == [1.0]


def test_rewards_are_reckoned_anew_but_not_of_what_is_leased_or_trained(under: Any, engine: Engine) -> None:
    old = under()
    trained(old)
    leased(old)
    committed(old)
    rewarded(old)
    new = under(weights={"reward": 3.0})
    before = rows(engine)
    assert new.recording.recompute_rewards(dry_run=True) == (2, 2)
    assert rows(engine) == before
    assert new.recording.recompute_rewards() == (2, 2)
    assert rewards(engine) == [1.0, 1.0, 3.0, 3.0]
    assert [row.state for row in rows(engine)] == [row.state for row in before]
    assert new.recording.recompute_rewards() == (2, 0)


_values = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
_said = st.one_of(
    st.fixed_dictionaries({"value": _values}),
    st.fixed_dictionaries({"value": st.sampled_from([0.0, 1.0]), "kind": st.just(Kind.BOOLEAN)}),
    st.just({"value": None, "kind": Kind.RETRACTION}),
    st.just({"value": None, "kind": Kind.COMMENT, "text": "so", "metric": "comment"}),
)
_whose = st.fixed_dictionaries({}, optional={"source": st.sampled_from(["a", "b"])})
_about = st.sampled_from([{"msg_id": "chatcmpl-x"}, {"msg_id": None, "task_id": "task", "run_id": "run"}])


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(heard=st.lists(st.tuples(_said, _whose, _about), max_size=6), place=st.integers(0, 6), data=st.data())
def test_the_reward_does_not_depend_on_when_the_row_comes_nor_on_repetitions(
    ledger: Ledger, engine: Engine, heard: list[Any], place: int, data: st.DataObject
) -> None:
    with engine.begin() as connection:
        for table in (feedback_table, experiences, exchanges):
            connection.execute(delete(table))
    said = exchange(msg_id="chatcmpl-x", task_id="task", run_id="run", received_at=0.0)
    made = [feedback(**what, **whose, **about) for what, whose, about in heard]
    ledger.recording.record([said])
    for event in made:
        ledger.recording.record([event])
    expected = rewards(engine)
    with engine.begin() as connection:
        for table in (feedback_table, experiences, exchanges):
            connection.execute(delete(table))
    again = [*made[:place], said, *made[place:]]
    cut = data.draw(st.integers(0, len(again)))
    for some in (again[:cut], again):
        ledger.recording.record(some)
    assert rewards(engine) == expected


def test_a_preference_that_is_retracted_takes_its_reward_from_both(under: Any, engine: Engine) -> None:
    ledger = under(weights={"preference": 1.0}, boolean_values=(-1.0, 1.0))
    better, worse = exchange(), exchange()
    preference = {"kind": Kind.PREFERENCE, "metric": "preference", "value": None}
    ledger.recording.record([better, worse, feedback(msg_id=better.msg_id, other_msg_id=worse.msg_id, **preference)])
    assert rewards(engine) == [1.0, -1.0]
    ledger.recording.record([feedback(msg_id=better.msg_id, **retraction(metric="preference"))])
    assert rewards(engine) == [None, None]
    assert ledger.reports.counts()[State.RECORDED] == 2
    ledger.recording.record([feedback(msg_id=worse.msg_id, other_msg_id=better.msg_id, **preference)])
    assert rewards(engine) == [-1.0, 1.0]
    ledger.recording.recompute_rewards()
    assert rewards(engine) == [-1.0, 1.0]
