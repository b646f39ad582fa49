from tests.factories import exchange, experience
from tuneloop.shared.ledger.ledger import Ledger


def test_what_will_not_be_trained_on_is_told_by_reply_and_choice(ledger: Ledger) -> None:
    strict, dropped = experience(choice=1, unsampled="sampling:tools"), experience(drop_reason="cut_off")
    mixed, cut, plain = exchange(experiences=(experience(), strict)), exchange(experiences=(dropped,)), exchange()
    ledger.recording.record([mixed, cut, plain])
    named = [each.msg_id for each in (mixed, cut, plain)]
    of_cut = {cut.msg_id: {0: "cut_off"}}
    assert ledger.reports.not_trained(named, any_reply=False) == of_cut | {mixed.msg_id: {1: "sampling:tools"}}
    assert ledger.reports.not_trained(named, any_reply=True) == of_cut
    assert ledger.reports.not_trained(named[2:], any_reply=False) == {}
