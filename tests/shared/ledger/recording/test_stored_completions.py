"""Stored completions in the ledger: listed by keyset, found by tags, relabelled, deleted for good."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, LargeBinary, event, insert, literal, select

from tests.factories import exchange, experience, fill, rewarded
from tests.factories import feedback as heard
from tests.shared.retaining import EVERYTHING, column, everything, in_work, trained
from tuneloop.shared.experience import Exchange, Kind, State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.recording import stored_completions
from tuneloop.shared.ledger.recording.stored_completions import (
    Deletion,
    Order,
    PageCursor,
    completion,
    select_page,
    select_tagged,
    tag_of_model,
    tag_of_pair,
)
from tuneloop.shared.ledger.storage.schema import changed_metadata, deletions, exchanges, experiences, feedback, tags
from tuneloop.shared.settings.feedback import RewardRule

NOW = 1e9


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, clock=lambda: NOW)


def asked(model: str = "m", **but: Any) -> Exchange:
    metadata = but.pop("metadata", {})
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "metadata": metadata}
    return exchange(request=json.dumps(body).encode(), **but)


def pair(key: str, value: str) -> bytes:
    return tag_of_pair("acme", key, value)


def pages(ledger: Ledger, *wanted: bytes, order: Order = "asc", limit: int = 2) -> Iterator[list[str]]:
    after = None
    while True:
        page = ledger.stored.page("acme", wanted=wanted, after=after, order=order, limit=limit)
        assert page is not None
        yield [each.msg_id for each in page.found]
        if not page.more:
            return
        after = ledger.stored.cursor_of("acme", page.found[-1].msg_id)


def names(ledger: Ledger, *wanted: bytes, **how: Any) -> list[str]:
    return [msg_id for page in pages(ledger, *wanted, **how) for msg_id in page]


def metadata_of(ledger: Ledger, msg_id: str) -> dict[str, str]:
    stored = ledger.stored.get("acme", msg_id)
    assert stored is not None
    return dict(completion(stored, default_model="m")["metadata"])


def test_a_completion_is_there_whole_or_not_at_all(ledger: Ledger, engine: Engine) -> None:
    said = asked(experiences=(experience(choice=0), experience(choice=1)))
    meanwhile = [lambda: ledger.stored.delete("acme", said.msg_id), lambda: ledger.recording.record([said])]

    @event.listens_for(engine, "after_cursor_execute")
    def _between(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if meanwhile and sql.startswith("SELECT exchanges") and not sql.startswith("SELECT exchanges.msg_id \nFROM"):
            meanwhile.pop()()

    assert ledger.stored.get("acme", said.msg_id) is None
    stored = ledger.stored.get("acme", said.msg_id)
    assert stored is not None
    assert [each.choice for each in stored.choices] == [0, 1]
    assert (meanwhile, ledger.stored.get("acme", said.msg_id)) == ([], None)


# Lists.


def test_what_is_found_has_all_that_is_wanted(ledger: Ledger) -> None:
    both = asked(metadata={"a": "1", "b": "2"})
    ledger.recording.record(
        [both, asked(metadata={"a": "1"}), asked(metadata={"a": "2", "b": "1"}), asked(model="other")]
    )
    assert len(names(ledger, pair("a", "1"))) == 2
    assert names(ledger, pair("a", "1"), pair("b", "2")) == [both.msg_id]
    assert names(ledger, pair("a", "1"), pair("b", "2"), tag_of_model("acme", "m")) == [both.msg_id]
    assert names(ledger, pair("a", "1"), tag_of_model("acme", "other")) == []
    assert names(ledger, pair("a1", "")) == names(ledger, pair("a", "3")) == []


def test_a_page_of_several_tags_looks_at_so_many_and_no_more(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_completions, "MAX_EXAMINED", 5)
    for number in range(12):
        ledger.recording.record(
            [asked(received_at=float(number), metadata={"a": "1"} | ({"b": "2"} if number in (1, 7) else {}))]
        )
    ledger.recording.record([asked(received_at=20.0, metadata={"b": "2"}) for _ in range(5)])
    wanted = (pair("a", "1"), pair("b", "2"))
    first = ledger.stored.page("acme", wanted=wanted, after=None, order="asc", limit=2)
    assert first is not None
    assert ([each.received_at for each in first.found], first.more) == ([1.0], True)
    # From there both are within reach, and behind the last there is nothing to be found in five.
    assert ledger.stored.page("acme", wanted=wanted, after=PageCursor(1.0, "z"), order="asc", limit=2) is None
    last = ledger.stored.page("acme", wanted=wanted, after=PageCursor(8.0, ""), order="asc", limit=2)
    assert last == ([], False)


def plan_of(engine: Engine, query: Any) -> str:
    compiled = query.compile(engine)
    values = compiled.params
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            return str(connection.exec_driver_sql(f"EXPLAIN {compiled}", values).all())
        positions = tuple(values[name] for name in compiled.positiontup)
        return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", positions).all())


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("after", [None, PageCursor(9000.0, "chatcmpl-9000")])
def test_a_page_reads_an_index_in_its_order(engine: Engine, order: Order, after: PageCursor | None) -> None:
    fill(engine, 20_000)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE exchanges SET endpoint = '/v1/chat/completions' WHERE received_at > 1000")
        of_all = select(literal(tag_of_model("acme", "m"), LargeBinary), exchanges.c.received_at, exchanges.c.msg_id)
        connection.execute(insert(tags).from_select(["tag", "received_at", "msg_id"], of_all))
        connection.exec_driver_sql("ANALYZE")
    by_time = plan_of(engine, select_page("acme", after, order, 101))
    by_tag = plan_of(engine, select_tagged(tag_of_model("acme", "m"), after, order, 101))
    assert "ix_exchanges_chat" in by_time
    assert "pk_tags" in by_tag or "PRIMARY KEY" in by_tag
    for plan in (by_time, by_tag):
        assert not any(word in plan for word in ("Sort", "TEMP B-TREE", "Seq Scan", "SCAN exchanges USING"))


# Metadata.


def test_changed_metadata_stand_in_the_place_of_the_requests(ledger: Ledger, engine: Engine) -> None:
    said = asked(metadata={"old": "1", "task_id": "t"}, task_id="t", run_id="r")
    ledger.recording.record([said])
    assert metadata_of(ledger, said.msg_id) == {"old": "1", "task_id": "t"}
    for new in ({"new": "2", "nul": "\0"}, {"new": "3"}, {}):
        assert ledger.stored.change_metadata("acme", said.msg_id, pairs=new)
        assert metadata_of(ledger, said.msg_id) == new
        assert names(ledger, pair("old", "1")) == []
        assert names(ledger, *(pair(*each) for each in new.items()), tag_of_model("acme", "m")) == [said.msg_id]
    with engine.connect() as connection:
        labels = connection.execute(select(experiences.c.task_id, experiences.c.run_id)).all()
    assert labels == [("t", "r")]
    assert not ledger.stored.change_metadata("acme", "chatcmpl-none", pairs={})


def test_what_is_recorded_again_is_found_by_its_changed_metadata_only(ledger: Ledger) -> None:
    said = asked(metadata={"old": "1"})
    ledger.recording.record([said])
    ledger.stored.change_metadata("acme", said.msg_id, pairs={"new": "2"})
    ledger.recording.record([said, asked(metadata={"old": "9"})])
    assert names(ledger, pair("old", "1")) == []
    assert names(ledger, pair("new", "2")) == [said.msg_id]
    assert len(names(ledger, pair("old", "9"))) == 1


# Deletions.


def test_a_deletion_takes_everything_of_a_completion_and_nothing_else(ledger: Ledger, engine: Engine) -> None:
    [other] = rewarded(ledger, request=b'{"model": "m", "metadata": {"k": "v"}}')
    before = everything(engine)
    said = asked(metadata={"k": "v"}, task_id="t", run_id="r")
    ledger.recording.record([said, heard(msg_id=said.msg_id), heard(msg_id=None, task_id="t", run_id="r", value=0.5)])
    ledger.stored.change_metadata("acme", said.msg_id, pairs={"k": "w"})
    assert ledger.stored.delete("acme", said.msg_id) is Deletion.DONE
    assert everything(engine) == before
    assert column(engine, tags.c.msg_id) == [other.msg_id] * 2
    assert column(engine, changed_metadata.c.msg_id) == []
    assert ledger.stored.delete("acme", said.msg_id) is None
    assert ledger.stored.get("acme", said.msg_id) is None
    assert column(engine, deletions.c.msg_id) == [said.msg_id]


def test_what_was_deleted_does_not_come_back_and_hears_nothing_any_more(ledger: Ledger, engine: Engine) -> None:
    said, other = asked(), asked()
    ledger.recording.record([said, other])
    ledger.stored.delete("acme", said.msg_id)
    preferred = heard(msg_id=other.msg_id, kind=Kind.PREFERENCE, value=None, other_msg_id=said.msg_id)
    late = [heard(msg_id=said.msg_id), preferred]
    taken = heard(msg_id=other.msg_id)
    outcomes = ledger.recording.record([said, *late, taken]).outcomes
    assert names(ledger) == [other.msg_id]
    assert column(engine, experiences.c.msg_id) == [other.msg_id]
    assert column(engine, tags.c.msg_id) == [other.msg_id]
    assert column(engine, feedback.c.event_id) == [taken.event_id]
    assert outcomes == dict.fromkeys([event.event_id for event in late], "unknown") | {taken.event_id: "accepted"}


def test_a_deletion_and_what_is_recorded_meanwhile_do_not_cross(ledger: Ledger, engine: Engine) -> None:
    """Two explorers: one empties an old spool once more, the other is asked to delete."""
    said = [asked(metadata={"k": "v"}) for _ in range(40)]
    ledger.recording.record(said)

    def again() -> None:
        for each in said * 2:
            ledger.recording.record([each])
            ledger.recording.record([each, heard(msg_id=each.msg_id)])

    with ThreadPoolExecutor(3) as pool:
        recording = [pool.submit(again) for _ in range(2)]
        deleting = pool.submit(lambda: [ledger.stored.delete("acme", each.msg_id) for each in said])
        assert deleting.result() == [Deletion.DONE] * len(said)
        for each in recording:
            each.result()
    left = everything(engine)
    assert (left["exchanges"], left["experiences"], left["feedback"]) == ([], [], [])
    assert column(engine, tags.c.msg_id) == []


def test_what_a_version_was_trained_on_is_counted_as_purged(ledger: Ledger) -> None:
    said = trained(ledger, 2)
    assert ledger.stored.delete("acme", said[0].msg_id) is Deletion.DONE
    assert ledger.reports.imbalance() == []
    assert ledger.reports.counts()[State.TRAINED] == 1
    assert ledger.stored.delete("acme", said[1].msg_id) is Deletion.DONE
    assert ledger.reports.imbalance() == []


def test_what_is_leased_stays_as_it_is_until_the_lease_ends(ledger: Ledger, engine: Engine) -> None:
    in_work(ledger)
    [held] = column_where(engine, State.LEASED)
    before = everything(engine)
    assert ledger.stored.delete("acme", held) is Deletion.LEASED
    assert everything(engine) == before
    ledger.training.take_epoch("next trainer")
    assert ledger.stored.delete("acme", held) is Deletion.DONE
    assert ledger.reports.imbalance() == []


def column_where(engine: Engine, state: State) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(experiences.c.msg_id).where(experiences.c.state == state)).scalars())


def test_a_trained_row_goes_with_the_repeat_that_waits(engine: Engine) -> None:
    ledger = Ledger(engine, rule=RewardRule(), compensate_late=True, clock=lambda: NOW)
    [said] = trained(ledger)
    ledger.recording.record([heard(msg_id=said.msg_id, value=0.0)])
    assert len(column(engine, experiences.c.id)) == 2
    assert len(ledger.stored.get("acme", said.msg_id).choices) == 1  # type: ignore[union-attr]
    assert ledger.stored.delete("acme", said.msg_id) is Deletion.DONE
    assert column(engine, experiences.c.id) == []
    assert ledger.reports.imbalance() == []


@pytest.mark.parametrize("deleted", ["better", "worse"])
def test_the_other_of_two_replies_loses_the_reward_of_their_comparison(engine: Engine, deleted: str) -> None:
    ledger = Ledger(engine, rule=RewardRule(weights={"preference": 1.0}))
    two = {"better": asked(), "worse": asked()}
    better, worse = (each.msg_id for each in two.values())
    said = {"kind": Kind.PREFERENCE, "metric": "preference", "value": None, "other_msg_id": worse}
    ledger.recording.record([*two.values(), heard(msg_id=better, **said)])
    assert ledger.reports.counts()[State.REWARDED] == 2
    ledger.stored.delete("acme", two[deleted].msg_id)
    assert {state: count for state, count in ledger.reports.counts().items() if count} == {State.RECORDED: 1}
    assert column(engine, feedback.c.id) == []


def test_a_purge_and_an_erasure_leave_no_tag_behind(ledger: Ledger, engine: Engine) -> None:
    purged, erased = asked(received_at=1.0), asked(user="ann", received_at=NOW)
    ledger.recording.record([purged, erased])
    for each in (purged, erased):
        ledger.stored.change_metadata("acme", each.msg_id, pairs={"k": "v"})
    ledger.retention.purge(EVERYTHING)
    assert set(column(engine, tags.c.msg_id)) == {erased.msg_id}
    ledger.retention.erase("acme", "ann")
    assert column(engine, tags.c.msg_id) == column(engine, changed_metadata.c.msg_id) == []
