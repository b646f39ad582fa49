"""What the ledger keeps of outboxes: how far each file was taken, and what of it was refused."""

import pytest
from sqlalchemy import Engine

from tests.doubles.clock import Clock
from tests.factories import exchange, feedback
from tuneloop.shared.errors import RecordRefused
from tuneloop.shared.experience import State, encode
from tuneloop.shared.ledger.ledger import Ledger

DAMAGED = b"\xff\0damaged"


@pytest.fixture
def ledger(engine: Engine, clock: Clock) -> Ledger:
    return Ledger(engine, clock=clock)


@pytest.mark.contract
def test_what_was_taken_of_a_file_is_not_taken_again(ledger: Ledger) -> None:
    said = [exchange() for _ in range(4)]
    ledger.recording.record(said[:2], [("a", 1), ("a", 2)])
    ledger.recording.record([said[2]], [("b", 7)])
    assert ledger.recording.taken_numbers(["a", "b", "c"]) == {"a": 2, "b": 7}
    ledger.recording.record([exchange(), said[3], exchange()], [("a", 2), ("a", 3), ("b", 6)])
    assert ledger.reports.counts()[State.RECORDED] == 4
    assert ledger.recording.taken_numbers(["a", "b"]) == {"a": 3, "b": 7}


def test_a_group_that_is_refused_moves_no_number(ledger: Ledger) -> None:
    with pytest.raises(RecordRefused):
        ledger.recording.record([exchange(), feedback(value=float("nan"))], [("a", 1), ("a", 2)])
    assert ledger.recording.taken_numbers(["a"]) == {}
    assert ledger.reports.counts()[State.RECORDED] == 0


@pytest.mark.contract
def test_what_was_refused_is_listed_read_and_forgotten(ledger: Ledger, clock: Clock) -> None:
    ledger.recording.record([exchange()], [("a", 3)])
    clock.now += 1
    for _ in range(2):
        ledger.recording.refuse("a", 4, 900, payload := encode(exchange()), "the database refuses it\0")
    clock.now += 1
    ledger.recording.refuse("a", 2, 300, DAMAGED, "damaged")
    assert ledger.recording.taken_numbers(["a"]) == {"a": 4}
    first, second = ledger.recording.refused_records()
    assert first == ("a", 900, 4, "the database refuses it\N{REPLACEMENT CHARACTER}", len(payload), clock.now - 1)
    assert second == ("a", 300, 2, "damaged", len(DAMAGED), clock.now)
    assert ledger.recording.refused_payload("a", 300) == DAMAGED
    assert ledger.recording.refused_payload("a", 301) is None
    assert [ledger.recording.delete_refused("a", 300) for _ in range(2)] == [True, False]
    assert ledger.recording.refused_records() == [first]


def test_a_file_that_nobody_has_removed_and_nobody_has_is_told(ledger: Ledger, clock: Clock) -> None:
    for file in ("here", "removed", "elsewhere"):
        ledger.recording.record([exchange()], [(file, 1)])
    ledger.recording.note_removed(["removed", "unknown"])
    clock.now += 100.0
    ledger.recording.record([exchange()], [("new", 1)])
    assert ledger.recording.unseen_files({"here"}, 60.0) == ["elsewhere"]
    assert ledger.recording.unseen_files({"here"}, 100.0) == []


@pytest.mark.contract
def test_a_person_who_is_deleted_goes_from_what_was_refused_and_so_do_damaged_bytes(ledger: Ledger) -> None:
    there, refused = exchange(user="ann"), exchange(user="ann")
    ledger.recording.record([there])
    theirs = [refused, feedback(msg_id=refused.msg_id), feedback(msg_id=there.msg_id), feedback(source="key:web/ann")]
    others = [exchange(user="bob"), exchange(user="ann", tenant="other"), feedback(source="bob")]
    for number, record in enumerate([*theirs, *others], start=1):
        ledger.recording.refuse("a", number, 100 * number, encode(record), "refused")
    ledger.recording.refuse("a", 9, 900, DAMAGED, "damaged")
    ledger.retention.erase("acme", "ann", dry_run=True)
    assert len(ledger.recording.refused_records()) == 8
    ledger.retention.erase("acme", "ann")
    assert [each.number for each in ledger.recording.refused_records()] == [5, 6, 7]
    ledger.recording.refuse("a", 10, 1000, encode(exchange(user="ann", received_at=1.0)), "refused after that")
    assert len(ledger.recording.refused_records()) == 3
    assert ledger.recording.taken_numbers(["a"]) == {"a": 10}
