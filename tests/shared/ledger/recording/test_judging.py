"""What a judge asks of the ledger, on either database."""

from tests.factories import committed, exchange, experience, feedback, rewarded, trained
from tuneloop.shared.experience import Exchange
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording.judging import JudgedExchange


def recorded(ledger: Ledger, **but: object) -> Exchange:
    said = exchange(**but)
    ledger.recording.record([said])
    return said


def test_replies_come_in_the_order_in_which_they_were_recorded(ledger: Ledger) -> None:
    late = recorded(ledger, received_at=100.0, experiences=(experience(), experience(choice=1)))
    early = recorded(ledger, received_at=1.0)
    found = ledger.judging.replies_after(0, limit=10)
    assert [(each.msg_id, each.choice) for each in found] == [(late.msg_id, 0), (late.msg_id, 1), (early.msg_id, 0)]
    assert [each.state for each in found] == ["recorded"] * 3
    assert ledger.judging.replies_after(found[0].id, limit=1) == [found[1]]
    assert ledger.judging.replies_after(found[-1].id, limit=1) == []


def test_looking_begins_with_the_first_that_waits_and_is_not_too_old(ledger: Ledger) -> None:
    assert ledger.judging.first_sampled_since(0.0) == 1
    trained(ledger)
    recorded(ledger, received_at=1.0)
    [wanted] = rewarded(ledger, received_at=50.0)
    committed(ledger, received_at=60.0)
    ids = {each.msg_id: each.id for each in ledger.judging.replies_after(0, limit=10)}
    assert ledger.judging.first_sampled_since(40.0) == ids[wanted.msg_id]
    assert ledger.judging.first_sampled_since(1e12) == max(ids.values()) + 1


def test_what_replies_say_and_what_was_said_of_them(ledger: Ledger) -> None:
    said = recorded(ledger, request=b'{"prompt": "x"}', endpoint="/v1/completions", experiences=(experience(text="y"),))
    [reply] = ledger.judging.replies_after(0, limit=1)
    assert ledger.judging.exchanges_of([reply.id, 999]) == {
        reply.id: JudgedExchange("/v1/completions", b'{"prompt": "x"}', 0, "y", None)
    }
    assert ledger.judging.exchanges_of([]) == {}
    ledger.recording.record([feedback(msg_id=said.msg_id, event_id="e-1")])
    assert ledger.judging.existing_events(["e-1", "e-2"]) == {"e-1"}
    assert ledger.judging.existing_events([]) == set()
