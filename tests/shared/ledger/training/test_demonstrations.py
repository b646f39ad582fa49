"""Edited answers: what a reply counts as that was edited, and how they reach the trainer."""

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import event as events_of

from tests.factories import committed, exchange, experience, feedback, ids, published
from tuneloop.shared.experience import Exchange, Feedback, Kind, Outcome, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.reward_rule import Event, Reward, definition, reward_of, rule_of
from tuneloop.shared.settings.feedback import RewardRule


def said(kind: Kind, at: float, **but: Any) -> Event:
    fields = {"id": int(at), "kind": kind, "metric": "reward", "value": None, "text": None, "source": None}
    return Event(**fields | {"preferred": False, "received_at": at} | but)


def edit(at: float, **but: Any) -> Event:
    return said(Kind.DEMONSTRATION, at, **{"metric": "demonstration", "text": "Better."} | but)


@pytest.mark.parametrize(
    ("events", "reward"),
    [
        ([edit(1.0)], Reward(None, 1.0, 1)),
        # A rating is the reward, whoever edits the reply and whichever comes first.
        ([said(Kind.NUMBER, 1.0, value=0.2), edit(2.0)], Reward(0.2, 2.0, 2)),
        ([edit(1.0), said(Kind.NUMBER, 2.0, value=0.2)], Reward(0.2, 2.0, 1)),
        ([edit(1.0, metric="reward"), said(Kind.NUMBER, 2.0, value=0.2)], Reward(0.2, 2.0, 1)),
        ([said(Kind.NUMBER, 1.0, value=0.2), edit(2.0), said(Kind.RETRACTION, 3.0)], Reward(None, 2.0, 2)),
        # An edited answer is taken back under its own metric, by who wrote it.
        ([edit(1.0), said(Kind.RETRACTION, 2.0, metric="demonstration")], None),
        ([edit(1.0), said(Kind.RETRACTION, 2.0)], Reward(None, 1.0, 1)),
        ([edit(1.0), said(Kind.RETRACTION, 2.0, metric="demonstration", source="bob")], Reward(None, 1.0, 1)),
        ([edit(1.0, source="ann"), edit(2.0, source="bob"), edit(3.0, source="ann")], Reward(None, 3.0, 3)),
        # The reply's own goes before that of its run, whichever comes first.
        ([edit(1.0), edit(2.0, of_run=True)], Reward(None, 1.0, 1)),
        ([edit(1.0, of_run=True), edit(2.0), said(Kind.RETRACTION, 3.0, metric="demonstration")], Reward(None, 1.0, 1)),
    ],
)
def test_an_edited_answer_is_no_reward(events: list[Event], reward: Reward | None) -> None:
    assert reward_of(RewardRule(), events, sampled_at=0.0) == reward


def test_a_rule_that_gave_edited_answers_a_value_is_still_read() -> None:
    older = definition(RewardRule()).replace("{", '{"demonstration_value":1.0,', 1)
    assert rule_of(older) == RewardRule()


def about(told: Exchange, kind: Kind = Kind.DEMONSTRATION, **but: Any) -> Feedback:
    """By default an edited answer."""
    fields = {"msg_id": told.msg_id, "kind": kind, "metric": "demonstration", "value": None}
    return feedback(**fields | ({"text": "Better."} if kind is Kind.DEMONSTRATION else {}) | but)


SFT = BatchRules(any_reply=True, edited=True)


def state_of(ledger: Ledger, msg_id: str) -> tuple[State, float | None]:
    """The state and the reward of a reply of one choice, its last correction."""
    view = ledger.exchange_views.get("acme", msg_id)
    assert view is not None
    return view.replies[-1].state, view.replies[-1].reward


def newest(ledger: Ledger) -> float:
    """The mean of what the replies of version 0 count as."""
    return ledger.reward_history.newest(0, among=10).mean


@pytest.mark.contract
def test_a_reply_that_was_only_edited_has_no_reward_and_goes_to_supervised_methods_alone(ledger: Ledger) -> None:
    told, rated = exchange(), exchange()
    ledger.recording.record([told, about(told), rated, feedback(msg_id=rated.msg_id)])
    assert state_of(ledger, told.msg_id) == (State.REWARDED, None)
    assert ledger.recording.commit("acme") == 2
    epoch = ledger.training.take_epoch("trainer")
    for policy in (BatchRules(), BatchRules(any_reply=True), BatchRules(group_by="run", by_result=True)):
        assert [each.msg_id for each in ledger.training.lease(epoch, 1, policy)] == [rated.msg_id]
        assert ledger.training.lease(epoch, 2, policy) == []
        assert ledger.reports.facts(policy).edited == 1
        ledger.training.release(epoch)
    assert ledger.reports.facts(SFT).edited == 0
    leased = {each.msg_id: each.demonstration for each in ledger.training.lease(epoch, 2, SFT)}
    assert leased == {told.msg_id: "Better.", rated.msg_id: None}


@pytest.mark.contract
@pytest.mark.parametrize("group_by", ["run", "task", "preference"])
def test_a_reply_that_was_only_edited_does_not_keep_others_waiting(ledger: Ledger, group_by: str) -> None:
    told, *rated = (exchange(task_id="t", run_id=f"r{number}") for number in range(3))
    ledger.recording.record([told, about(told), *rated, *(feedback(msg_id=each.msg_id) for each in rated)])
    preferred = feedback(msg_id=rated[0].msg_id, other_msg_id=rated[1].msg_id, kind=Kind.PREFERENCE, value=None)
    ledger.recording.record([preferred])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    # What a supervised method has put into a group is not left there for another one.
    if group_by == "run":
        ledger.training.lease(epoch, 3, SFT._replace(group_by="run"))
        ledger.training.release(epoch)
    policy = BatchRules(group_by=group_by, group_size=2, any_reply=group_by == "preference")
    assert {each.msg_id for each in ledger.training.lease(epoch, 2, policy)} == {each.msg_id for each in rated}
    assert ledger.training.lease(epoch, 1, policy._replace(batch_timeout=0.0)) == []


@pytest.mark.contract
def test_a_version_is_judged_by_how_much_its_replies_were_edited(ledger: Ledger) -> None:
    wrong, nearly = (exchange(experiences=(experience(text=text),)) for text in ("10", "It arrives on Monday."))
    ledger.recording.record([wrong, nearly, about(wrong, text="18"), about(nearly, text="It arrives on Sunday.")])
    expected = (0.5 + (1 - 2 / 21)) / 2
    assert newest(ledger) == pytest.approx(expected)
    assert ledger.comparisons.figures(0, 0.0).reward.mean == pytest.approx(expected)
    [of_base] = ledger.reports.rewards()
    assert (of_base.rewarded, of_base.reward_sum) == (2, pytest.approx(2 * expected))


@pytest.mark.contract
def test_a_rating_of_an_edited_reply_is_its_reward(ledger: Ledger) -> None:
    told = exchange(experiences=(experience(text="10"),))
    ledger.recording.record([told, about(told, text="18", source="ann")])
    ledger.recording.record([feedback(msg_id=told.msg_id, value=0.25, source="bob")])
    assert state_of(ledger, told.msg_id) == (State.REWARDED, 0.25)
    assert newest(ledger) == 0.25
    ledger.recording.commit("acme")
    [sample] = ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules())
    assert (sample.reward, sample.demonstration) == (0.25, "18")


@pytest.mark.contract
def test_a_committed_reply_whose_edit_is_taken_back_is_recorded_again(ledger: Ledger) -> None:
    told = exchange()
    ledger.recording.record([told, about(told)])
    ledger.recording.commit("acme")
    ledger.recording.record([about(told, Kind.RETRACTION)])
    assert state_of(ledger, told.msg_id) == (State.RECORDED, None)
    assert ledger.reward_history.newest(0, among=10).replies == 0


def test_a_rating_that_is_taken_back_leaves_the_edit(ledger: Ledger) -> None:
    told = exchange()
    ledger.recording.record([told, about(told), feedback(msg_id=told.msg_id)])
    ledger.recording.commit("acme")
    ledger.recording.record([feedback(msg_id=told.msg_id, kind=Kind.RETRACTION, value=None)])
    assert state_of(ledger, told.msg_id) == (State.COMMITTED, None)


@pytest.mark.contract
def test_an_edit_that_comes_after_training_is_late_and_taught_if_late_feedback_is(engine: Engine) -> None:
    for compensate, after in ((False, (State.TRAINED, None)), (True, (State.REWARDED, None))):
        ledger, told = Ledger(engine, compensate_late=compensate), exchange()
        ledger.recording.record([told, about(told)])
        ledger.recording.commit("acme")
        epoch = ledger.training.take_epoch("trainer")
        ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, SFT)), step=1, publish=published)
        heard = about(told, call_id="c", text="Best.")
        for _ in range(2):
            assert ledger.recording.record([heard]).outcomes == {heard.event_id: Outcome.LATE}
            assert state_of(ledger, told.msg_id) == after
    ledger.recording.commit("acme")
    [again] = ledger.training.lease(epoch, 1, SFT)
    assert (again.demonstration, again.msg_id) == ("Best.", told.msg_id)


@pytest.mark.contract
def test_an_edit_that_comes_while_its_reply_is_leased_is_heeded_when_the_lease_ends(ledger: Ledger) -> None:
    told = exchange()
    ledger.recording.record([told, about(told)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.lease(epoch, 1, SFT)
    ledger.recording.record([about(told, Kind.RETRACTION)])
    assert state_of(ledger, told.msg_id) == (State.LEASED, None)
    ledger.training.release(epoch)
    assert state_of(ledger, told.msg_id) == (State.RECORDED, None)


def leased_after(ledger: Ledger, told: Exchange, heard: list[Feedback]) -> list[str | None]:
    ledger.recording.record([told, feedback(msg_id=told.msg_id), *heard])
    ledger.recording.commit("acme")
    samples = ledger.training.lease(ledger.training.take_epoch("trainer"), len(told.experiences), BatchRules())
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

    ledger.training.lease(epoch, 20, BatchRules())
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
