"""Calls that were cut off, or asked again as no answer reached the client: what feedback on their run counts."""

from typing import Any

import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import Exchange
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.reward_rule import definition, rule_of
from tuneloop.shared.ledger.recording.rewards import read_history
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.settings.feedback import RewardRule

RUN = {"task_id": "t", "run_id": "r"}


def called(*, cut: bool = False, **but: Any) -> Exchange:
    reply = experience(drop_reason="cut_off", finish_reason=None) if cut else experience()
    return exchange(**{"experiences": (reply,), **RUN, **but})


def rewards(ledger: Ledger) -> list[float | None]:
    with ledger.transactions.write() as connection:
        return list(connection.execute(select(experiences.c.reward).order_by(experiences.c.id)).scalars())


def states(ledger: Ledger) -> list[tuple[str, str | None]]:
    with ledger.transactions.write() as connection:
        rows = connection.execute(select(experiences.c.state, experiences.c.reason).order_by(experiences.c.id))
        return [(row.state, row.reason) for row in rows]


@pytest.mark.contract
def test_feedback_on_a_run_without_an_end_counts_nothing_and_says_so(ledger: Ledger) -> None:
    first, last = called(), called(cut=True)
    of_run = feedback(msg_id=None, value=1.0, **RUN)
    found = ledger.recording.record([first, last, of_run, feedback(msg_id=first.msg_id, value=0.2, metric="other")])
    assert rewards(ledger) == [None, None]
    assert (found.of_runs, found.unfinished) == ({of_run.event_id: []}, {of_run.event_id: True})
    assert ledger.recording.commit("acme") == 0
    # What is said of a call itself counts.
    ledger.recording.record([feedback(msg_id=first.msg_id, value=0.5)])
    assert rewards(ledger) == [0.5, None]


@pytest.mark.contract
@pytest.mark.parametrize("judged_first", [False, True])
def test_a_call_after_the_one_that_was_cut_off_ends_the_run(ledger: Ledger, judged_first: bool) -> None:
    first, cut, again = called(), called(cut=True), called()
    of_run = feedback(msg_id=None, value=1.0, **RUN)
    ledger.recording.record([first, cut, *([of_run] if judged_first else [again])])
    ledger.recording.record([again if judged_first else of_run])
    assert rewards(ledger) == [1.0, 1.0, 1.0]  # that of the dropped row trains nothing
    assert ledger.recording.commit("acme") == 2


def test_the_end_that_comes_after_the_feedback_takes_the_reward_back(ledger: Ledger) -> None:
    first, other = called(), called(run_id="other")
    ledger.recording.record(
        [first, other, *(feedback(msg_id=None, value=1.0, **RUN | {"run_id": each.run_id}) for each in (first, other))]
    )
    assert ledger.recording.commit("acme") == 2
    ledger.recording.record([called(cut=True)])
    assert rewards(ledger) == [None, 1.0, None]


def test_one_choice_that_came_to_its_end_is_enough(ledger: Ledger) -> None:
    choices = (experience(), experience(choice=1, drop_reason="cut_off", finish_reason=None))
    ledger.recording.record([called(experiences=choices), feedback(msg_id=None, value=1.0, **RUN)])
    assert rewards(ledger) == [1.0, 1.0]


def test_the_settings_may_let_it_count(engine: Engine) -> None:
    rule = RewardRule(unfinished_runs="count")
    ledger = Ledger(engine, rule=rule)
    found = ledger.recording.record([called(), called(cut=True), feedback(msg_id=None, value=1.0, **RUN)])
    assert (rewards(ledger), found.unfinished) == ([1.0, 1.0], {})
    # Rules that were written down before there was a choice let it count.
    assert "unfinished_runs" not in definition(rule)
    assert rule_of(definition(rule)) == rule
    assert rule_of(definition(RewardRule())).unfinished_runs == "ignore"


def test_the_history_of_a_reply_says_why_the_word_does_not_count(ledger: Ledger) -> None:
    first = called()
    ledger.recording.record([first, called(cut=True), feedback(msg_id=None, value=1.0, **RUN)])
    rewarding = ledger.recording._rewards
    with ledger.transactions.write() as connection:
        [told] = read_history(connection, first.msg_id, lambda row: RewardRule(), rewarding.trusted_raters).values()
    assert [fate.fate for _, fate in told.events] == ["unfinished_run"]


ASKED = b'{"messages": [{"role": "user", "content": "When?"}]}'


@pytest.mark.contract
def test_the_attempt_before_a_retry_is_dropped_and_shares_no_reward(ledger: Ledger) -> None:
    before, lost, again = called(), called(request=ASKED), called(request=ASKED, is_retry=True)
    ledger.recording.record([before, lost])
    ledger.recording.record([again, feedback(msg_id=None, value=1.0, **RUN)])
    assert rewards(ledger) == [1.0, None, 1.0]
    assert states(ledger) == [("rewarded", None), ("dropped", "retried"), ("rewarded", None)]
    assert ledger.recording.commit("acme") == 2


@pytest.mark.contract
def test_a_reward_that_came_before_the_retry_is_taken_back(ledger: Ledger) -> None:
    ledger.recording.record([called(request=ASKED), feedback(msg_id=None, value=1.0, **RUN)])
    ledger.recording.record([called(request=ASKED, is_retry=True)])
    assert rewards(ledger) == [None, 1.0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"request": ASKED}, {"request": ASKED}),  # the same was asked twice
        ({"request": ASKED}, {"request": b"{}", "is_retry": True}),  # another attempt was not recorded
        ({"request": ASKED, "run_id": "other"}, {"request": ASKED, "is_retry": True}),
        ({"request": ASKED, "tenant": "other"}, {"request": ASKED, "is_retry": True}),
    ],
)
def test_no_other_call_is_taken_for_an_attempt_before(
    ledger: Ledger, first: dict[str, Any], second: dict[str, Any]
) -> None:
    ledger.recording.record([called(**first), called(**second)])
    assert states(ledger) == [("recorded", None), ("recorded", None)]


def test_a_reply_of_which_something_was_said_has_reached_its_client(ledger: Ledger) -> None:
    first = called(request=ASKED)
    ledger.recording.record([first, feedback(msg_id=first.msg_id, value=0.5)])
    ledger.recording.record([called(request=ASKED, is_retry=True)])
    assert states(ledger)[0] == ("rewarded", None)
