import traceback
from typing import Any

import pytest
from sqlalchemy import Engine, event, select

from tests.factories import exchange, experience, feedback, rewarded
from tests.shared.ledger.reading import rewards, rows
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import MAX_NAME, State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import exchanges


def only(**counts: int) -> dict[State, int]:
    return {state: counts.get(state, 0) for state in State}


def test_the_first_to_use_a_msg_id_keeps_it(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record([exchange(msg_id="chatcmpl-x", experiences=(experience(text="first"),))])
    ledger.recording.record([exchange(msg_id="chatcmpl-x", experiences=(experience(text="second"),))])
    assert [row.text for row in rows(engine)] == ["first"]


def test_feedback_without_a_choice_is_for_all_and_a_later_one_for_one(ledger: Ledger, engine: Engine) -> None:
    said = exchange(experiences=tuple(experience(choice=choice) for choice in range(3)))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, value=0.5)])
    ledger.recording.record([feedback(msg_id=said.msg_id, choice=2, value=-1.0)])
    assert rewards(engine) == [0.5, 0.5, -1.0]


def test_what_must_not_be_trained_on_is_dropped_with_its_reason_and_still_takes_a_reward(
    ledger: Ledger, engine: Engine
) -> None:
    said = exchange(experiences=(experience(drop_reason="cut off"),))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, value=0.5)])
    assert [(row.state, row.reason, row.reward) for row in rows(engine)] == [("dropped", "cut off", 0.5)]
    assert ledger.recording.commit("acme") == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused_whole(ledger: Ledger, reward: float) -> None:
    said = exchange()
    with pytest.raises(LedgerError, match="refuses"):
        ledger.recording.record([said, feedback(msg_id=said.msg_id, value=reward)])
    assert ledger.reports.counts() == only()


def test_what_no_database_can_hold_is_replaced(ledger: Ledger, engine: Engine) -> None:
    odd = "a\0b\ud800c"
    said = exchange(task_id=odd, run_id=odd, request=b"\0\xff", experiences=(experience(text=odd, drop_reason=odd),))
    ledger.recording.record([said, feedback(msg_id=said.msg_id, task_id=odd, run_id=odd)])
    [row] = rows(engine)
    assert row.text == row.reason == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"
    with engine.connect() as connection:
        stored = connection.execute(select(exchanges)).one()
    assert stored.request == b"\0\xff"
    assert row.task_id == row.run_id == row.text


def test_a_task_of_any_name_is_committed_by_that_name(ledger: Ledger) -> None:
    for name in ("a\0b\ud800", "\N{GRINNING FACE}" * MAX_NAME, "", "%_'\"", "\N{GRINNING FACE}"):
        rewarded(ledger, task_id=name)
        assert ledger.recording.commit("acme", task_id=name) == 1


def test_an_error_quotes_nothing_that_a_user_wrote(ledger: Ledger) -> None:
    secret = experience(text="my secret", version_min=2, version_max=1)
    with pytest.raises(LedgerError) as caught:
        ledger.recording.record([exchange(experiences=(secret,))])
    assert "my secret" not in "".join(traceback.format_exception(caught.value)).replace('text="my secret"', "")


def test_the_statements_of_a_rating_are_few_and_made_once(ledger: Ledger, engine: Engine) -> None:
    said = [exchange(), exchange()]
    ledger.recording.record([*said, first := exchange(), feedback(msg_id=first.msg_id)])
    executed: list[object] = []
    event.listen(engine, "before_execute", lambda _connection, statement, *_: executed.append(statement))
    for each in said:
        ledger.recording.record([feedback(msg_id=each.msg_id)], [("file", len(executed) + 1)])
    ours = [statement for statement in executed if not isinstance(statement, str)]  # else the driver's own
    last = len(ours) // 2 - 1  # the file is known by then
    assert [each for each in ours[-last:] if each not in ours[:-last]] == []
    assert 0 < len(ours) <= 2 * 18 + 2, "the file is new once"


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 4),
        ({"task_id": "a"}, 2),
        ({"run_id": "1"}, 2),
        ({"task_id": "a", "run_id": "1"}, 1),
        ({"until": 20.0}, 2),
        ({"task_id": "a", "until": 10.0}, 1),
        ({"task_id": "c"}, 0),
        ({"run_id": ""}, 0),
        ({"until": 9.0}, 0),
    ],
)
def test_commit_takes_what_all_filters_name(ledger: Ledger, filters: dict[str, Any], count: int) -> None:
    labels = [("a", "1", 10.0), ("a", "2", 20.0), ("b", "1", 30.0), (None, None, 40.0)]
    for task_id, run_id, received_at in labels:
        rewarded(ledger, task_id=task_id, run_id=run_id, received_at=received_at)
    assert ledger.recording.commit("acme", **filters) == count
    assert ledger.reports.counts() == only(rewarded=4 - count, committed=count)


def test_commit_takes_only_what_is_rewarded_and_only_once(ledger: Ledger) -> None:
    rewarded(ledger)
    ledger.recording.record([exchange()])
    assert [ledger.recording.commit("acme"), ledger.recording.commit("acme")] == [1, 0]
