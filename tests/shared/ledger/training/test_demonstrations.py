"""Edited answers: what they are worth, and how they reach the trainer."""

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import event as events_of

from tests.factories import committed, exchange, experience, feedback, ids, published
from tuneloop.shared.experience import Exchange, Feedback, Kind, Outcome
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.ledger.recording.reward_rule import Event, Reward, definition, reward_of, rule_of
from tuneloop.shared.settings.feedback import RewardRule


def said(kind: Kind, at: float, **but: Any) -> Event:
    fields = {"id": int(at), "kind": kind, "metric": "reward", "value": None, "text": None, "source": None}
    return Event(**fields | {"preferred": False, "received_at": at} | but)


def edit(at: float, **but: Any) -> Event:
    return said(Kind.DEMONSTRATION, at, **{"metric": "demonstration", "text": "Better."} | but)


ONE = RewardRule(demonstration_value=1.0)


@pytest.mark.parametrize(
    ("rule", "events", "reward"),
    [
        (RewardRule(), [edit(1.0)], None),
        (ONE, [edit(1.0)], Reward(1.0, 1.0)),
        (RewardRule(demonstration_value=0.0), [edit(1.0)], Reward(0.0, 1.0)),
        (RewardRule(demonstration_value=1.0, weights={"reward": 0.5}), [edit(1.0)], Reward(0.5, 1.0)),
        (RewardRule(demonstration_value=1.0, weights={"demonstration": 1.0}), [edit(1.0)], None),
        (RewardRule(demonstration_value=9.0, clip=(-1.0, 1.0)), [edit(1.0)], Reward(1.0, 1.0)),
        # Who says a number says it of the reply, whichever comes first; others speak for themselves.
        (ONE, [said(Kind.NUMBER, 1.0, value=0.2), edit(2.0)], Reward(0.2, 1.0)),
        (ONE, [edit(1.0), said(Kind.NUMBER, 2.0, value=0.2)], Reward(0.2, 2.0)),
        (ONE, [said(Kind.NUMBER, 1.0, value=0.2, source="ann"), edit(2.0, source="bob")], Reward(0.6, 2.0)),
        (ONE, [said(Kind.NUMBER, 1.0, value=0.2), edit(2.0), said(Kind.RETRACTION, 3.0)], Reward(1.0, 2.0)),
        # It is taken back under its own metric.
        (ONE, [edit(1.0), said(Kind.RETRACTION, 2.0, metric="demonstration")], None),
        (ONE, [edit(1.0), said(Kind.RETRACTION, 2.0)], Reward(1.0, 1.0)),
        (ONE, [edit(1.0), said(Kind.RETRACTION, 2.0, metric="demonstration", source="bob")], Reward(1.0, 1.0)),
        (ONE, [edit(1.0, metric="reward"), said(Kind.NUMBER, 2.0, value=0.2)], Reward(0.2, 2.0)),
    ],
)
def test_what_an_edited_answer_is_worth(rule: RewardRule, events: list[Event], reward: Reward | None) -> None:
    assert reward_of(rule, events, sampled_at=0.0) == reward


def test_it_counts_only_in_the_window() -> None:
    rule = RewardRule(demonstration_value=1.0, attribution_window=10.0)
    assert reward_of(rule, [edit(11.0)], sampled_at=0.0) is None


def test_a_rule_without_its_value_is_written_as_it_always_was() -> None:
    assert "demonstration_value" not in definition(RewardRule())
    assert rule_of(definition(RewardRule())) == RewardRule()
    assert rule_of(definition(ONE)) == ONE


def about(told: Exchange, kind: Kind = Kind.DEMONSTRATION, **but: Any) -> Feedback:
    """By default an edited answer."""
    fields = {"msg_id": told.msg_id, "kind": kind, "metric": "demonstration", "value": None}
    return feedback(**fields | ({"text": "Better."} if kind is Kind.DEMONSTRATION else {}) | but)


def test_a_reply_with_nothing_else_goes_down_the_road(engine: Engine) -> None:
    ledger, told = Ledger(engine, rule=ONE), exchange()
    ledger.recording.record([told, about(told)])
    assert ledger.recording.commit("acme") == 1
    [sample] = ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchPolicy())
    assert (sample.reward, sample.demonstration) == (1.0, "Better.")


def test_one_that_comes_after_training_is_late_only_if_it_counts(engine: Engine) -> None:
    for rule, outcome in ((RewardRule(), Outcome.ACCEPTED), (ONE, Outcome.LATE)):
        ledger = Ledger(engine, rule=rule)
        [told] = committed(ledger)
        epoch = ledger.training.take_epoch("trainer")
        ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchPolicy())), step=1, publish=published)
        heard = about(told, call_id="c")
        ledger.recording.record([heard])
        assert ledger.recording.outcomes("c", [heard.event_id]) == {heard.event_id: outcome}


def leased_after(ledger: Ledger, told: Exchange, heard: list[Feedback]) -> list[str | None]:
    """The edited answers of the choices, as the trainer gets them."""
    ledger.recording.record([told, feedback(msg_id=told.msg_id), *heard])
    ledger.recording.commit("acme")
    samples = ledger.training.lease(ledger.training.take_epoch("trainer"), len(told.experiences), BatchPolicy())
    return [sample.demonstration for sample in samples]


def two(**but: Any) -> Exchange:
    return exchange(experiences=(experience(), experience(choice=1)), **but)


def test_the_latest_that_stands_is_the_one(ledger: Ledger) -> None:
    told = two()
    heard = [
        about(told, text="First.", source="ann"),
        about(told, text="Second.", source="bob"),
        about(told, text="Third.", source="ann"),
        about(told, text="Of one choice.", source="cy", choice=1),
        about(told, Kind.RETRACTION, source="ann"),
    ]
    assert leased_after(ledger, told, heard) == ["Second.", "Of one choice."]


def test_what_was_taken_back_is_not_given(ledger: Ledger) -> None:
    told = two()
    heard = [about(told), about(told, Kind.RETRACTION, choice=1)]
    assert leased_after(ledger, told, heard) == ["Better.", None]


def test_a_retraction_of_something_else_leaves_it(ledger: Ledger) -> None:
    told = exchange()
    heard = [about(told), about(told, Kind.RETRACTION, metric="other"), about(told, Kind.RETRACTION, source="bob")]
    assert leased_after(ledger, told, heard) == ["Better."]


def test_one_about_a_whole_run_is_about_its_replies(ledger: Ledger) -> None:
    told = exchange(task_id="t", run_id="r")
    heard = [about(told, msg_id=None, task_id="t", run_id="r"), about(told, tenant="other", text="Theirs.")]
    assert leased_after(ledger, told, heard) == ["Better."]


def test_a_lease_asks_once_for_all_of_its_rows(engine: Engine, ledger: Ledger) -> None:
    committed(ledger, 20)
    epoch, asked = ledger.training.take_epoch("trainer"), list[str]()

    @events_of.listens_for(engine, "before_cursor_execute")
    def seen(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        asked.extend([statement] if "FROM feedback" in statement else [])

    ledger.training.lease(epoch, 20, BatchPolicy())
    assert len(asked) == 1


@pytest.mark.contract
@pytest.mark.parametrize("run_first", [False, True])
def test_one_about_a_reply_goes_before_one_about_its_run(ledger: Ledger, run_first: bool) -> None:
    told = two(task_id="t", run_id="r")
    heard = [
        about(told, text="Its own.", choice=0),
        about(told, msg_id=None, task_id="t", run_id="r", text="Of the run."),
    ]
    assert leased_after(ledger, told, heard[::-1] if run_first else heard) == ["Its own.", "Of the run."]
