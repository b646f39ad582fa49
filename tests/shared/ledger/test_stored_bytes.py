"""What the database holds of each key is counted with its rows, whatever brings them and whatever takes them away."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from tests.databases import engine_of, put_file
from tests.factories import exchange, experience, feedback
from tests.shared.retaining import EVERYTHING, NOW, OLD
from tuneloop.shared.experience import DEFAULT_TENANT, Exchange, Feedback, Kind
from tuneloop.shared.ledger.keys import KeyGrant, KeyLimits, digest_of
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.key_tables import stored_by_keys
from tuneloop.shared.ledger.stored_bytes import CHOICE_BYTES, EVENT_BYTES, EXCHANGE_BYTES, NO_KEY


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    """A ledger whose clock stands at NOW."""
    return Ledger(engine, clock=lambda: NOW)


def stored(ledger: Ledger, name: str = "web") -> int:
    """The bytes of a key of acme, which must be those of its rows."""
    assert ledger.reports.audit() == []
    _, _ = ledger.keys.create(KeyGrant(name=name, tenant="acme"), actor="test")
    return next(each.stored_bytes for each in ledger.keys.all() if (each.name, each.tenant) == (name, "acme"))


def reply(**but: object) -> Exchange:
    return exchange(key="web", received_at=OLD, user="ann", **but)


def said_of(said: Exchange, **but: object) -> Feedback:
    return feedback(msg_id=said.msg_id, key="web", received_at=OLD, **but)


def test_a_key_has_what_its_rows_take_and_others_have_nothing_of_it(ledger: Ledger) -> None:
    choices = tuple(experience(choice=number, text="x" * 5000) for number in range(2))
    said = reply(request=b'{"messages": []}', experiences=choices)
    ledger.recording.record([said])
    one = stored(ledger)
    assert one > EXCHANGE_BYTES + 2 * (CHOICE_BYTES + 5000)
    ledger.recording.record([said_of(said, kind=Kind.COMMENT, value=None, text="é" * 100)])
    assert stored(ledger) == one + EVENT_BYTES + 200
    ledger.recording.record([exchange(), exchange(key="web", tenant="globex"), feedback(msg_id=said.msg_id)])
    assert stored(ledger) == one + EVENT_BYTES + 200
    assert stored(ledger, "other") == 0


def test_a_spool_that_is_read_twice_counts_once(ledger: Ledger) -> None:
    said = reply()
    records = [said, said_of(said, value=0.0), said_of(said, value=1.0), said_of(said, value=0.0)]
    ledger.recording.record(records)
    once = stored(ledger)
    for again in (records, records[1:], [said, *records]):
        ledger.recording.record(again)
        assert stored(ledger) == once


def test_a_transaction_that_fails_counts_nothing(ledger: Ledger) -> None:
    ledger.recording.record([reply()])
    before = stored(ledger)
    with pytest.raises(Exception, match="refuse"):
        ledger.recording.record([reply(), reply(experiences=(experience(version_min=2, version_max=1),))])
    assert stored(ledger) == before


GONE: dict[str, Callable[[Ledger, Exchange], object]] = {
    "retention": lambda ledger, said: ledger.retention.purge(EVERYTHING),
    "erasure": lambda ledger, said: ledger.retention.erase("acme", "ann"),
    "deletion": lambda ledger, said: ledger.stored.delete("acme", said.msg_id),
}


@pytest.mark.parametrize("way", GONE)
def test_what_is_deleted_counts_no_more(ledger: Ledger, way: str) -> None:
    said = reply()
    ledger.recording.record([said, said_of(said), said_of(said, metric="tone", source="key:web/bob")])
    assert stored(ledger) > EXCHANGE_BYTES + 2 * EVENT_BYTES
    GONE[way](ledger, said)
    assert stored(ledger) == 0


def test_feedback_whose_reply_never_comes_counts_until_it_is_purged(ledger: Ledger) -> None:
    ledger.recording.record([feedback(msg_id="nowhere", key="web", received_at=OLD)])
    assert stored(ledger) == EVENT_BYTES
    ledger.retention.purge(EVERYTHING)
    assert stored(ledger) == 0


def test_the_audit_sees_a_count_that_is_wrong(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record([reply()])
    with engine.begin() as connection:
        connection.execute(update(stored_by_keys).values(bytes=stored_by_keys.c.bytes + 7))
    assert ledger.reports.audit() == ["the rows of the key acme/web take -7 bytes more than are counted"]


def test_what_is_stored_is_told_of_each_key_that_is_in_force(ledger: Ledger) -> None:
    ledger.recording.record([reply()])
    bound = KeyGrant(name="web", tenant="acme", limits=KeyLimits(max_stored_bytes=1 << 40))
    key, _ = ledger.keys.create(bound, actor="test")
    free, _ = ledger.keys.create(KeyGrant(name="free", tenant="acme"), actor="test")
    gone, _ = ledger.keys.create(KeyGrant(name="gone", tenant="acme"), actor="test")
    ledger.keys.revoke(gone.key_id, actor="test")
    assert ledger.keys.stored_bytes() == {key.key_id: key.stored_bytes, free.key_id: 0, NO_KEY: 0}
    assert key.stored_bytes == stored(ledger)
    assert key.limits.max_stored_bytes == 1 << 40


def test_what_comes_without_a_key_is_counted_together(ledger: Ledger) -> None:
    said = exchange(tenant=DEFAULT_TENANT, received_at=OLD)
    told = feedback(tenant=DEFAULT_TENANT, msg_id=said.msg_id, received_at=OLD)
    ledger.recording.record([said, reply(tenant=DEFAULT_TENANT), exchange()])
    one = ledger.keys.table().stored_without_key
    assert one > EXCHANGE_BYTES + CHOICE_BYTES
    ledger.recording.record([said, told])
    assert ledger.keys.table().stored_without_key == ledger.keys.stored_bytes()[NO_KEY] == one + EVENT_BYTES
    assert ledger.reports.audit() == []
    ledger.retention.purge(EVERYTHING)
    assert ledger.keys.table().stored_without_key == 0
    assert ledger.reports.audit() == []


def test_what_is_counted_is_about_what_the_file_grows_by(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    put_file(url)
    ledger, file = Ledger(engine_of(url), clock=lambda: NOW), tmp_path / "ledger.db"
    ledger.retention.empty_log()
    before = file.stat().st_size
    for turn in range(10):
        names = [digest_of(f"{turn} {number}").hex() for number in range(100)]  # as long as signed ids are
        replies = [reply(msg_id=f"chatcmpl-{each[:50]}", task_id=each[:32], run_id=each[32:]) for each in names]
        said = [said_of(each, event_id=name, source="key:web/bob") for each, name in zip(replies, names, strict=True)]
        ledger.recording.record([*replies, *said])
    ledger.retention.empty_log()
    grown = file.stat().st_size - before
    assert 0.5 * grown < stored(ledger) < 2 * grown
