"""So much may be said of one reply or run, and no more work comes of it than that."""

from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import Feedback, Kind, Outcome
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.feedback import MAX_CHOICES_SAID, MAX_SAID, MAX_SAID_BY_ONE
from tuneloop.shared.ledger.storage.schema import feedback as feedback_table

RUN = {"msg_id": None, "task_id": "task", "run_id": "run"}


def stored(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(feedback_table)).scalar_one()


def without_room(outcomes: dict[str, Outcome]) -> set[str]:
    return {event_id for event_id, outcome in outcomes.items() if outcome is Outcome.FULL}


def record(ledger: Ledger, events: list[Feedback]) -> None:
    for start in range(0, len(events), 500):
        ledger.recording.record(events[start : start + 500])


@pytest.mark.parametrize("run", [False, True])
def test_beyond_so_many_events_nothing_is_stored_but_what_is_taken_back(
    ledger: Ledger, engine: Engine, *, run: bool
) -> None:
    said = exchange(task_id="task", run_id="run")
    ledger.recording.record([said])
    about: dict[str, Any] = RUN if run else {"msg_id": said.msg_id}
    record(ledger, [feedback(**about, source=f"rater {number}") for number in range(MAX_SAID + 100)])
    assert stored(engine) == MAX_SAID
    late = feedback(**about, source="one more")
    assert ledger.recording.record([late]).outcomes == {late.event_id: Outcome.FULL}
    retracted = feedback(**about, source="rater 3", kind=Kind.RETRACTION, value=None)
    unknown = feedback(**about, source="nobody", kind=Kind.RETRACTION, value=None)
    outcomes = ledger.recording.record([retracted, unknown]).outcomes
    assert outcomes == {retracted.event_id: Outcome.ACCEPTED, unknown.event_id: Outcome.FULL}
    assert stored(engine) == MAX_SAID + 1
    other = exchange()
    ledger.recording.record([other, feedback(msg_id=other.msg_id)])
    assert stored(engine) == MAX_SAID + 2


def test_one_key_leaves_room_for_others_whatever_names_it_uses(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said])
    record(ledger, [feedback(msg_id=said.msg_id, source=f"key:loud/{number}") for number in range(MAX_SAID)])
    assert stored(engine) == MAX_SAID_BY_ONE
    quiet = feedback(msg_id=said.msg_id, source="key:quiet", value=0.0)
    loud = feedback(msg_id=said.msg_id, source="key:loud/new")
    assert ledger.recording.record([loud, quiet]).outcomes == {
        loud.event_id: Outcome.FULL,
        quiet.event_id: Outcome.ACCEPTED,
    }


@pytest.mark.parametrize(("choices", "times"), [(1, 1), (3, 3), (30, MAX_CHOICES_SAID)])
def test_a_reply_has_room_by_its_choices_up_to_a_bound_of_all(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, choices: int, times: int
) -> None:
    monkeypatch.setattr("tuneloop.shared.ledger.recording.feedback.MAX_SAID", 4)
    monkeypatch.setattr("tuneloop.shared.ledger.recording.feedback.MAX_SAID_BY_ONE", 2)
    said = exchange(experiences=tuple(experience(choice=number) for number in range(choices)))
    ledger.recording.record([said])
    # Choices that there are not give no room.
    loud = [feedback(msg_id=said.msg_id, choice=number, source="key:loud") for number in range(100)]
    outcomes = ledger.recording.record(loud).outcomes
    assert stored(engine) == 2 * times
    assert without_room(outcomes) == {each.event_id for each in loud[2 * times :]}
    record(ledger, [feedback(msg_id=said.msg_id, source=f"rater {number}") for number in range(100)])
    assert stored(engine) == 4 * times


def test_a_long_text_is_a_repetition_only_if_it_is_the_same(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said])
    comment = {"msg_id": said.msg_id, "kind": Kind.COMMENT, "metric": "comment", "value": None}
    for text, count in (("x" * 9000, 1), ("x" * 9000, 1), ("y" * 9000, 2), ("x" * 9000, 3)):
        ledger.recording.record([feedback(**comment, text=text)])
        assert stored(engine) == count


def test_feedback_on_replies_that_are_not_stored_is_not_kept_without_end(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.shared.ledger.recording.feedback.MAX_EARLY", 600)
    record(ledger, [feedback(msg_id=f"chatcmpl-none-{number}") for number in range(1000)])
    assert stored(engine) <= 600
    more = [feedback(msg_id=f"chatcmpl-more-{number}") for number in range(500)]
    Ledger(engine).recording.record(more[:100])  # another process, that counts for itself
    assert stored(engine) == 600
    early = feedback(msg_id=None, task_id="none", run_id="0")
    Ledger(engine).recording.record([early, *more[:10]])
    assert stored(engine) == 600
    refused = [*more[300:302], early]
    assert without_room(Ledger(engine).recording.record(refused).outcomes) == {each.event_id for each in refused}
    said, others = exchange(), feedback(tenant="globex", msg_id="chatcmpl-theirs")
    about = [feedback(msg_id=said.msg_id, value=number) for number in (1, 0.5)]
    assert without_room(ledger.recording.record([said, about[0], others]).outcomes) == set()
    assert stored(engine) == 602
    assert without_room(Ledger(engine).recording.record([about[1]]).outcomes) == set()


def test_a_key_leaves_room_for_early_feedback_of_the_others(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.shared.ledger.recording.feedback.MAX_EARLY", 600)

    def keep(key: str, count: int, teller: Ledger) -> int:
        said = [feedback(msg_id=f"chatcmpl-{key}-{count}-{number}", key=key) for number in range(count)]
        return count - len(without_room(teller.recording.record(said).outcomes))

    assert keep("loud", 1000, ledger) == 300
    assert keep("other", 100, ledger) == 100
    assert keep("loud", 10, Ledger(engine)) == 0, "another process counts for itself"
    assert keep("other", 1000, Ledger(engine)) == 50
    assert keep("third", 1000, Ledger(engine)) == 75
