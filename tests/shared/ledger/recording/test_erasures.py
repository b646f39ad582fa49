from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, select

from tests.factories import exchange, experience, ids, leased, published, rewarded
from tests.factories import feedback as heard
from tests.shared.retaining import IN_STATE, NOW, OLD, column, everything, in_work, recorded, trained
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import Kind, Outcome, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.retention import NOTHING_ERASED
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import deletions, exchanges, experiences, feedback
from tuneloop.shared.settings.feedback import RewardRule


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine, clock=lambda: NOW)


def test_a_person_goes_from_every_state_and_the_versions_that_know_them_are_told(
    ledger: Ledger, engine: Engine
) -> None:
    trained(ledger, 2, user="ann")
    trained(ledger, 1, user="bob")
    trained(ledger, 1, user="ann")
    for state, make in IN_STATE.items():
        if state != State.TRAINED:
            make(ledger, user="ann", received_at=OLD)
    in_work(ledger, user="ann")
    told = ledger.retention.erase("acme", "ann", dry_run=True)
    assert told == ledger.retention.erase("acme", "ann")
    assert (len(told.msg_ids), told.experiences, told.trained) == (9, 9, {1: 2, 3: 1})
    assert told.feedback == 7
    assert column(engine, exchanges.c.user_id) == ["bob"]
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 1}
    assert len(column(engine, feedback.c.id)) == 1
    assert ledger.reports.imbalance() == []
    assert ledger.retention.erase("acme", "ann") == NOTHING_ERASED


def test_another_tenants_person_of_that_name_stays(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record(
        [exchange(user="ann", tenant="other"), heard(source="ann", tenant="other"), exchange(user=None)]
    )
    assert ledger.retention.erase("acme", "ann") == NOTHING_ERASED
    assert len(column(engine, exchanges.c.msg_id)) == 2
    assert ledger.retention.erasures() == {("acme", "ann"): NOW}


def test_what_was_leased_and_erased_cannot_become_a_version(ledger: Ledger) -> None:
    epoch, samples = leased(ledger, 2)
    recorded(ledger, user="ann")
    with ledger.transactions.write() as connection:
        connection.exec_driver_sql(
            f"UPDATE exchanges SET user_id = 'ann' WHERE msg_id IN (SELECT msg_id FROM experiences WHERE id = "
            f"{samples[0].id})"
        )
    ledger.retention.erase("acme", "ann")
    with pytest.raises(LedgerError, match="trained on 2 experiences, 1 are leased"):
        ledger.training.register(epoch, ids(samples), step=1, publish=published)


@pytest.mark.parametrize("at", [NOW - 1, NOW])
def test_what_was_still_in_a_spool_is_not_taken_any_more(ledger: Ledger, engine: Engine, at: float) -> None:
    early = heard(msg_id="chatcmpl-late", text="parked", kind=Kind.COMMENT, value=None)
    ledger.recording.record([early])
    ledger.retention.erase("acme", "ann")
    late = exchange(msg_id="chatcmpl-late", user="ann", received_at=at)
    ledger.recording.record([late, heard(msg_id=late.msg_id), heard(msg_id="chatcmpl-x", source="ann", received_at=at)])
    left = everything(engine)
    assert (left["exchanges"], left["experiences"], left["feedback"]) == ([], [], [])


def test_what_others_say_and_what_is_said_later_is_taken(ledger: Ledger, engine: Engine) -> None:
    ledger.retention.erase("acme", "ann")
    others = [exchange(user="bob"), exchange(user="ann", tenant="other"), exchange()]
    later = exchange(user="ann", received_at=NOW + 1)
    ledger.recording.record([*others, later, heard(msg_id=later.msg_id, source="ann", received_at=NOW + 2)])
    assert len(column(engine, exchanges.c.msg_id)) == 4
    assert column(engine, feedback.c.source) == ["ann"]


def test_what_is_said_of_their_replies_afterwards_is_not_taken(ledger: Ledger, engine: Engine) -> None:
    """A judge had read one when it was deleted; another was still in a spool."""
    kept, read, spooled = exchange(user="bob"), exchange(user="ann"), exchange(user="ann")
    ledger.recording.record([kept, read])
    ledger.retention.erase("acme", "ann")
    ledger.recording.record([spooled])
    comment = {"kind": Kind.COMMENT, "value": None, "text": "goldfinch", "source": "judge", "received_at": NOW + 1}
    late = [heard(msg_id=each.msg_id, **comment) for each in (read, spooled)]
    compared = heard(msg_id=kept.msg_id, other_msg_id=read.msg_id, kind=Kind.PREFERENCE, value=None)
    taken = heard(msg_id=kept.msg_id, **comment)
    outcomes = ledger.recording.record([*late, compared, taken]).outcomes
    assert column(engine, feedback.c.event_id) == [taken.event_id]
    assert {*column(engine, deletions.c.msg_id)} == {read.msg_id, spooled.msg_id}
    assert [id_ for id_ in outcomes if outcomes[id_] is Outcome.UNKNOWN] == [e.event_id for e in (*late, compared)]


def test_others_take_the_rewards_that_they_have_without_the_feedback_of_the_person(
    ledger: Ledger, engine: Engine
) -> None:
    said = [exchange(user="bob") for _ in range(4)]
    [rated_by_two, rated_by_ann, trained_on, of_a_run] = said
    of_a_run = exchange(user="bob", task_id="t", run_id="r")
    ledger.recording.record([*said[:3], heard(msg_id=trained_on.msg_id, source="ann", value=0.25)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=1, publish=published)
    ledger.recording.record([of_a_run, heard(msg_id=None, task_id="t", run_id="r", source="ann", value=0.5)])
    ledger.recording.record(
        [heard(msg_id=rated_by_two.msg_id, source=who, value=value) for who, value in [("ann", 0), ("c", 1)]]
    )
    ledger.recording.record([heard(msg_id=rated_by_ann.msg_id, source="ann", value=1)])
    ledger.recording.commit("acme")
    assert ledger.retention.erase("acme", "ann") == NOTHING_ERASED._replace(feedback=4)
    with engine.connect() as connection:
        found = connection.execute(select(experiences.c.msg_id, experiences.c.state, experiences.c.reward))
        rows = {msg_id: (state, reward) for msg_id, state, reward in found}
    assert rows == {
        rated_by_two.msg_id: ("committed", 1.0),
        rated_by_ann.msg_id: ("recorded", None),
        trained_on.msg_id: ("trained", 0.25),
        of_a_run.msg_id: ("recorded", None),
    }
    assert column(engine, feedback.c.source) == ["c"]


def test_a_deletion_repeats_nothing_that_is_trained(engine: Engine) -> None:
    ledger = Ledger(engine, rule=RewardRule(attribution_window=1e12), compensate_late=True, clock=lambda: NOW)
    [said] = trained(ledger)
    ledger.recording.record(
        [
            *(heard(msg_id=said.msg_id, source=name, value=0.0) for name in ("ann", "b")),
            heard(msg_id=said.msg_id, kind=Kind.RETRACTION, value=None),
        ]
    )
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    ledger.training.register(epoch, ids(ledger.training.lease(epoch, 1, BatchRules())), step=2, publish=published)
    rows = len(column(engine, experiences.c.id))
    assert rows == 2
    ledger.retention.erase("acme", "ann")
    assert len(column(engine, experiences.c.id)) == rows


def test_what_is_left_of_a_group_is_gathered_anew(ledger: Ledger, engine: Engine) -> None:
    policy = BatchRules(group_by="task", group_size=2, group_timeout=1e12)
    for run, user in (("1", "ann"), ("2", "bob")):
        rewarded(ledger, 1, task_id="t", run_id=run, user=user)
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    assert len(ledger.training.lease(epoch, 2, policy)) == 2
    ledger.retention.erase("acme", "ann")
    ledger.training.release(epoch)
    with engine.connect() as connection:
        assert connection.execute(select(experiences.c.group_id)).scalars().all() == [None]
    assert ledger.training.lease(epoch, 1, policy) == []


def test_feedback_about_a_run_of_several_people_stays(ledger: Ledger, engine: Engine) -> None:
    for user in ("ann", "bob"):
        ledger.recording.record(
            [exchange(user=user, task_id="t", run_id="mixed"), exchange(user=user, task_id="t", run_id=user)]
        )
    ledger.recording.record([heard(msg_id=None, task_id="t", run_id=run) for run in ("mixed", "ann", "bob")])
    assert ledger.retention.erase("acme", "ann").feedback == 1
    assert column(engine, feedback.c.run_id) == ["bob", "mixed"]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_nothing_of_a_person_is_left_in_the_files_but_their_name(engine: Engine, tmp_path: Path) -> None:
    """Even where their rows were changed before, or SQLite was built to leave deleted bytes where they are."""

    @event.listens_for(engine, "connect", insert=True)
    def _leave_deleted_bytes(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA secure_delete = OFF")

    engine.dispose()
    ledger = Ledger(engine, clock=lambda: NOW)
    for number in range(60):
        words = "goldfinch" if number % 3 else "others"
        said = exchange(
            user="ann" if number % 3 else "bob",
            request=words.encode() * (1 + 40 * (number % 20)),
            task_id=words,
            experiences=(experience(text=words * (1 + 300 * (number % 5))),),
        )
        ledger.recording.record([said])
        ledger.recording.record(
            [heard(msg_id=said.msg_id, kind=Kind.COMMENT, value=None, text=words * 9, source="bob")]
        )
        ledger.recording.record([heard(msg_id=said.msg_id)])
        ledger.recording.commit("acme")
    assert any(b"goldfinch" in file.read_bytes() for file in tmp_path.iterdir())
    ledger.retention.erase("acme", "ann")
    assert ledger.retention.empty_log()
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name, data in files.items() if b"goldfinch" in data} == set()
    assert b"others" in files["ledger.db"]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_log_that_somebody_reads_is_said_not_to_be_empty(ledger: Ledger, engine: Engine) -> None:
    ledger.recording.record([exchange(user="ann")])
    with engine.connect() as reading:
        reading.execute(select(exchanges)).all()
        ledger.retention.erase("acme", "ann")
        assert not Ledger(impatient(engine)).retention.empty_log()
    assert ledger.retention.empty_log()


def impatient(engine: Engine) -> Engine:
    found = database.connect(str(engine.url))

    @event.listens_for(found, "connect")
    def _wait_for_nobody(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA busy_timeout = 0")

    return found


def test_feedback_that_a_person_gave_by_a_key_goes_too(ledger: Ledger, engine: Engine) -> None:
    said = exchange(user="bob")
    sources = ["ann", "key:web/ann", "key:web/joann", "key:web/x/ann", "key:web", "other/ann"]
    ledger.recording.record([said, *(heard(msg_id=said.msg_id, source=each) for each in sources)])
    assert ledger.retention.erase("acme", "ann").feedback == 2
    assert set(column(engine, feedback.c.source)) == set(sources[2:])
    late = [heard(msg_id=said.msg_id, source=each, received_at=OLD) for each in ("key:app/ann", "key:app/bob")]
    ledger.recording.record(late)
    assert set(column(engine, feedback.c.source)) == {*sources[2:], "key:app/bob"}
