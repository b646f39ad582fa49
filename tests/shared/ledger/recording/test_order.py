"""Feedback counts in the order in which it was received by the ledger's time, whenever its explorer brings it."""

from typing import Any

import pytest
from sqlalchemy import Engine, select

from tests.factories import exchange, experience, feedback, ids, leased, published
from tuneloop.shared.experience import Exchange, Feedback, Kind, Outcome, Stamp, boot
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.clock import LedgerClock
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.storage.schema import feedback as feedback_table
from tuneloop.shared.settings.feedback import RewardRule

TAKEN_BACK = {"kind": Kind.RETRACTION, "value": None}


def rewards(engine: Engine) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    with engine.connect() as connection:
        for row in connection.execute(select(experiences).order_by(experiences.c.choice, experiences.c.correction)):
            found.setdefault(row.msg_id, []).append(row.reward)
    return found


def stored(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(select(feedback_table.c.id)).all())


def recorder(engine: Engine, **rule: Any) -> Ledger:
    """A process of a machine that was started at 1000 by the ledger's time, and whose own clock is off."""
    clock = LedgerClock(engine, ticks=lambda: 100.0, database=lambda _: 1100.0)
    return Ledger(engine, rule=RewardRule(clip=None, **rule), clock=clock)


def at(seconds: float, msg_id: str, value: float | None = None, **but: Any) -> Feedback:
    what = TAKEN_BACK if value is None else {"value": value}
    return feedback(**{"msg_id": msg_id, "stamp": Stamp(boot(), seconds)} | what | but)


@pytest.mark.contract
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("taken_back", [False, True])
def test_the_last_words_win_whichever_of_two_explorers_drains_last(
    engine: Engine, first: int, taken_back: bool
) -> None:
    """The database was away; each explorer's own stream repeats itself."""
    two = [recorder(engine), recorder(engine)]
    said = [exchange() for _ in range(100)]
    two[0].recording.record(said)
    streams: list[list[Feedback]] = [[], []]
    expected = {}
    for number, each in enumerate(said):
        for turn in range(2 + number % 7):
            # One says 0 again and again, the other 1; both may take back what the other said in between.
            by, value = turn % 2, float(turn % 2)
            word = None if taken_back and turn % 5 == 3 else value
            streams[by].append(at(10.0 * turn, each.msg_id, word, received_at=5e9 - turn))
            expected[each.msg_id] = [word]
    for by in (first, 1 - first):
        for start in range(0, len(streams[by]), 64):
            some = streams[by][start : start + 64]
            two[by].recording.record(some, [(f"file {by}", start + place + 1) for place in range(len(some))])
    assert rewards(engine) == expected
    both = streams[1 - first] + streams[first]
    two[0].recording.record(both)
    assert rewards(engine) == expected, "what is offered again changes nothing"
    two[0].recording.recompute_rewards()
    assert rewards(engine) == expected


def test_of_one_call_the_last_word_counts(engine: Engine) -> None:
    ledger, said = recorder(engine), exchange()
    ledger.recording.record([said, at(1.0, said.msg_id, 0.0)])
    ledger.recording.record([at(5.0, said.msg_id, 1.0), at(5.0, said.msg_id, 0.0)])
    assert rewards(engine) == {said.msg_id: [0.0]}


def test_a_repetition_is_no_row_and_comes_after_what_was_said_in_between(engine: Engine) -> None:
    ledger, said = recorder(engine), exchange(experiences=(experience(), experience(choice=1)))
    ledger.recording.record([said, at(1.0, said.msg_id, 0.0, choice=1), at(5.0, said.msg_id, 1.0)])
    again = at(9.0, said.msg_id, 0.0, choice=1)
    assert ledger.recording.record([again]).outcomes == {again.event_id: Outcome.DUPLICATE}
    assert rewards(engine) == {said.msg_id: [1.0, 0.0]}
    ledger.recording.record([at(7.0, said.msg_id, 0.0, choice=1), at(8.0, said.msg_id, 0.5)])
    assert rewards(engine) == {said.msg_id: [0.5, 0.0]}
    assert stored(engine) == 3


def test_a_request_that_is_sent_again_is_no_later_word(engine: Engine) -> None:
    ledger, said = recorder(engine), exchange()
    ledger.recording.record([said, at(1.0, said.msg_id, 0.0, event_id="a key")])
    ledger.recording.record([at(9.0, said.msg_id, 0.0, event_id="a key", call_id="sent again")])
    ledger.recording.record([at(5.0, said.msg_id, 1.0)])
    assert rewards(engine) == {said.msg_id: [1.0]}


def test_what_is_said_again_after_the_window_has_no_later_place(engine: Engine) -> None:
    ledger, said = recorder(engine, attribution_window=50.0), exchange(stamp=Stamp(boot(), 0.0))
    ledger.recording.record([said, at(10.0, said.msg_id, 0.0), at(60.0, said.msg_id, 0.0)])
    ledger.recording.record([at(30.0, said.msg_id, 1.0)])
    assert rewards(engine) == {said.msg_id: [1.0]}
    ledger.recording.record([at(40.0, said.msg_id, 0.0)])
    assert rewards(engine) == {said.msg_id: [0.0]}


def test_the_latest_edited_answer_stands_whoever_repeats_his(engine: Engine) -> None:
    ledger, said = recorder(engine), exchange()
    edit = {"kind": Kind.DEMONSTRATION, "metric": "edit", "value": None}
    anns = [at(seconds, said.msg_id, **edit, source="ann", text="Ann's") for seconds in (1.0, 9.0)]
    ledger.recording.record([said, anns[0], anns[1]])
    ledger.recording.record([at(5.0, said.msg_id, **edit, source="bob", text="Bob's")])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    [sample] = ledger.training.lease(epoch, 1, BatchRules(edited=True))
    assert sample.demonstration == "Ann's"


def test_a_preference_that_was_taken_back_in_between_stands_where_it_was_said_again(engine: Engine) -> None:
    ledger, better, worse = recorder(engine, weights={"preference": 1.0}), exchange(), exchange()
    about = {"metric": "preference", "kind": Kind.PREFERENCE, "other_msg_id": worse.msg_id}
    preferred = [at(seconds, better.msg_id, **about) for seconds in (1.0, 9.0)]
    ledger.recording.record([better, worse, *preferred])
    ledger.recording.record([at(5.0, better.msg_id, metric="preference")])
    assert rewards(engine) == {better.msg_id: [1.0], worse.msg_id: [0.0]}
    ledger.recording.record([at(10.0, better.msg_id, metric="preference")])
    assert rewards(engine) == {better.msg_id: [None], worse.msg_id: [None]}


def trained_by(engine: Engine, ledger: Ledger) -> str:
    epoch, samples = leased(ledger)
    ledger.training.register(epoch, ids(samples), step=1, publish=published)
    [msg_id] = rewards(engine)
    return msg_id


def test_a_mere_repetition_repeats_nothing_that_is_trained(engine: Engine) -> None:
    ledger = Ledger(engine, rule=RewardRule(clip=None), compensate_late=True)
    msg_id = trained_by(engine, ledger)
    heard: list[Exchange | Feedback] = [feedback(msg_id=msg_id, value=0.5)]
    assert [*ledger.recording.record(heard).outcomes.values()] == [Outcome.LATE]
    for _ in range(2):
        again = feedback(msg_id=msg_id, value=0.5)
        assert ledger.recording.record([again]).outcomes == {again.event_id: Outcome.DUPLICATE}
    assert rewards(engine) == {msg_id: [1.0, 0.5]}
