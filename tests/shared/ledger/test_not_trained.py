import pytest
from sqlalchemy import Engine

from tests.factories import exchange, experience, feedback
from tuneloop.shared.ledger.ledger import Ledger


@pytest.mark.parametrize("any_reply", [True, False])
def test_what_will_not_be_trained_on_is_told_by_reply_and_choice(engine: Engine, any_reply: bool) -> None:
    strict, dropped = experience(choice=1, unsampled="sampling:tools"), experience(drop_reason="cut_off")
    mixed, cut, plain = exchange(experiences=(experience(), strict)), exchange(experiences=(dropped,)), exchange()
    heard = [feedback(msg_id=each.msg_id) for each in (mixed, cut, plain)]
    results = Ledger(engine, any_reply=any_reply).recording.record([mixed, cut, plain, *heard])
    unfit = {} if any_reply else {mixed.msg_id: {1: "sampling:tools"}}
    assert results.not_trained == {cut.msg_id: {0: "cut_off"}} | unfit
    assert results.of(heard[2:]).not_trained == {}
    assert results.of(heard).not_trained == results.not_trained
