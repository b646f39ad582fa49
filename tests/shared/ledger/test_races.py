"""Several processes at once, here threads with connections of their own."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from tests.factories import committed, exchange, feedback, fill, ids, leased, published, trained
from tuneloop.shared.errors import LedgerError, ParentEnded, StaleEpoch
from tuneloop.shared.experience import Exchange, Feedback, Kind, State, VersionState
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.recording.recording import Recording
from tuneloop.shared.ledger.recording.rewards import Plan, Rewards
from tuneloop.shared.ledger.storage.schema import feedback as feedback_table
from tuneloop.shared.settings.feedback import RewardRule


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return call()
        except LedgerError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def test_two_leasers_never_share_a_row(ledger: Ledger, engine: Engine) -> None:
    fill(engine, 400)
    epoch = ledger.training.take_epoch("trainer")
    batches = at_once(*[lambda: [ledger.training.lease(epoch, 20, BatchRules()) for _ in range(5)]] * 4)
    taken = [sample.id for each in batches for batch in each for sample in batch]
    assert sorted(taken) == list(range(1, 401))


def test_two_who_take_an_epoch_at_once_get_different_ones(ledger: Ledger) -> None:
    """The first of them in an empty table."""
    taken = [at_once(*[lambda: ledger.training.take_epoch("trainer")] * 4) for _ in range(5)]
    assert sorted(epoch for four in taken for epoch in four) == list(range(1, 21))


def test_whoever_was_overtaken_holds_nothing(ledger: Ledger, engine: Engine) -> None:
    """A lease that waited for a new epoch to be taken must see that epoch."""
    fill(engine, 200)

    def live() -> None:
        epoch = ledger.training.take_epoch("trainer")
        try:
            while ledger.training.lease(epoch, 1, BatchRules()):
                pass
        except StaleEpoch:
            pass

    at_once(*[live] * 6)
    with engine.connect() as connection:
        holders = connection.execute(text("SELECT DISTINCT lease_epoch FROM experiences WHERE state = 'leased'"))
        newest = connection.execute(text("SELECT max(epoch) FROM epochs")).scalar()
        assert holders.scalars().all() == [newest]


def test_a_lease_waits_while_a_new_epoch_is_being_taken(ledger: Ledger, engine: Engine) -> None:
    committed(ledger, 1)
    old = ledger.training.take_epoch("trainer")
    taking = threading.Event()

    def clock() -> float:
        taking.set()
        time.sleep(0.3)
        return 0.0

    def lease() -> Any:
        taking.wait()
        return ledger.training.lease(old, 1, BatchRules())

    epoch, stale = at_once(lambda: Ledger(engine, clock=clock).training.take_epoch("successor"), lease)
    assert epoch == old + 1
    assert isinstance(stale, StaleEpoch)


def test_who_is_overtaken_while_it_publishes_registers_nothing(ledger: Ledger) -> None:
    """Else the version would hold rows that the successor trains on as well."""
    epoch, samples = leased(ledger, 2)

    def publish(version: int) -> tuple[Path, str]:
        assert ledger.training.take_epoch("successor") == epoch + 1
        return published(version)

    with pytest.raises(StaleEpoch):
        ledger.training.register(epoch, ids(samples), step=1, publish=publish)
    assert ledger.reports.counts()[State.TRAINED] == 0
    assert ids(ledger.training.lease(epoch + 1, 2, BatchRules())) == ids(samples)


def test_what_descends_from_a_version_that_is_rolled_back_meanwhile_is_never_gone_on_from(ledger: Ledger) -> None:
    """A rollback that comes while the next version is put in its place is that version's end too."""
    ledger.versions.ensure_base(Path("base"))
    first = trained(ledger)
    ledger.versions.promote(first)
    epoch, samples = leased(ledger)

    def publish(version: int) -> tuple[Path, str]:
        ledger.versions.roll_back(first, by="ann", reason="rude")
        return published(version)

    with pytest.raises(ParentEnded):
        ledger.training.register(epoch, ids(samples), step=2, publish=publish, parent=first)
    assert ledger.versions.newest().version == 0
    assert [each.state for each in ledger.versions.all()] == [VersionState.CHAMPION, VersionState.ROLLED_BACK]


def test_a_reply_and_its_feedback_recorded_at_once_find_each_other(ledger: Ledger) -> None:
    for number in range(60):
        name = f"chatcmpl-r{number}"
        said, heard = exchange(msg_id=name), feedback(msg_id=name)
        at_once(lambda said=said: ledger.recording.record([said]), lambda heard=heard: ledger.recording.record([heard]))  # type: ignore[misc]
    assert ledger.reports.counts()[State.REWARDED] == 60


def test_the_last_of_many_feedbacks_at_once_is_the_reward(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said])
    events = [feedback(msg_id=said.msg_id, value=float(number)) for number in range(40)]
    at_once(*[lambda some=events[start::4]: [ledger.recording.record([event]) for event in some] for start in range(4)])  # type: ignore[misc]
    assert [row.reward_sum for row in ledger.reports.rewards()] == [39.0]
    with engine.connect() as connection:
        assert len(connection.execute(select(feedback_table.c.id)).all()) == 40


def test_a_record_that_two_offer_at_once_is_stored_once(ledger: Ledger, engine: Engine) -> None:
    said = exchange()
    ledger.recording.record([said])
    for number in range(1, 21):
        # Not known by its id: what one of them does not store for its number, the other has.
        offers = [[feedback(msg_id=said.msg_id, value=float(number)), exchange()] for _ in range(3)]
        places = [("file", 2 * number - 1), ("file", 2 * number)]
        at_once(*[lambda offer=offer: ledger.recording.record(offer, places) for offer in offers])  # type: ignore[misc]  # noqa: B023
    assert ledger.recording.taken_numbers(["file"]) == {"file": 40}
    with engine.connect() as connection:
        assert len(connection.execute(select(feedback_table.c.id)).all()) == 20
    assert sum(ledger.reports.counts().values()) == 21


def test_exchanges_alone_that_two_offer_at_once_are_stored_once(ledger: Ledger) -> None:
    for number in range(1, 21):
        at_once(*[lambda: ledger.recording.record([exchange()], [("file", number)])] * 3)  # noqa: B023
    assert sum(ledger.reports.counts().values()) == 20


def test_a_correction_comes_before_the_lease_or_not_at_all(ledger: Ledger, engine: Engine) -> None:
    said = committed(ledger, 40)
    epoch = ledger.training.take_epoch("trainer")
    corrections = [feedback(msg_id=each.msg_id, value=-1.0) for each in said]
    leases, _ = at_once(
        lambda: [ledger.training.lease(epoch, 1, BatchRules()) for _ in said],
        lambda: [ledger.recording.record([correction]) for correction in corrections],
    )
    seen = {sample.id: sample.reward for batch in leases for sample in batch}
    with engine.connect() as connection:
        stored = connection.execute(text("SELECT id, reward FROM experiences WHERE state = 'leased'")).all()
    assert {id_: reward for id_, reward in stored} == seen


def test_there_is_one_champion_however_many_promote(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    for _ in range(8):
        trained(ledger)
    done = at_once(*[lambda version=version: ledger.versions.promote(version) for version in range(1, 9)])  # type: ignore[misc]
    assert done == [None] * 8
    assert [version.version for version in ledger.versions.all() if version.state == VersionState.CHAMPION] == [8]
    assert ledger.versions.champion().version == 8


def test_a_version_is_promoted_or_rejected_but_not_both(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    for _ in range(6):
        version = trained(ledger)
        at_once(lambda: ledger.versions.promote(version), lambda: ledger.versions.reject(version, "worse"))  # noqa: B023
        found = ledger.versions.all()[version]
        assert found.state == (VersionState.REJECTED if found.reason else VersionState.CHAMPION)


def test_many_may_register_the_base_model_at_once(ledger: Ledger) -> None:
    assert at_once(*[lambda: ledger.versions.ensure_base(Path("/base"))] * 4) == [None] * 4
    assert at_once(*[lambda: ledger.own("shop", "assistant")] * 4) == [None] * 4
    assert len(ledger.versions.all()) == 1


def test_feedback_on_another_reply_does_not_wait(ledger: Ledger, engine: Engine) -> None:
    """On SQLite all who write wait for each other anyway."""
    if engine.dialect.name == "sqlite":
        return
    said = [exchange() for _ in range(2)]
    ledger.recording.record(said)
    inside, go_on = threading.Event(), threading.Event()

    class Held(Rewards):
        def plan(self, *args: Any, **kwargs: Any) -> Plan:
            inside.set()
            assert go_on.wait(60)
            return super().plan(*args, **kwargs)

    held = Recording(ledger.transactions, Held(RewardRule(clip=None)))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(held.record, [feedback(msg_id=said[0].msg_id, value=1.0)])
        assert inside.wait(60)
        pool.submit(ledger.recording.record, [feedback(msg_id=said[1].msg_id), exchange()]).result(60)
        correction = pool.submit(ledger.recording.record, [feedback(msg_id=said[0].msg_id, value=5.0)])
        time.sleep(0.3)
        assert not correction.done()
        go_on.set()
        first.result(60)
        correction.result(60)
    assert {row.reward_sum for row in ledger.reports.rewards()} == {6.0}


def test_whatever_is_said_at_once_rewards_are_those_of_all_of_it(ledger: Ledger) -> None:
    """Replies, early feedback, labels, whole runs, preferences and retractions, of the same few replies and runs."""
    chance = random.Random(7)
    names = [f"chatcmpl-{number}" for number in range(24)]
    labels = [("task", "0"), ("task", "1"), ("task", None), (None, "1"), (None, None)]
    records: list[Exchange | Feedback] = []
    for name in names:
        task_id, run_id = chance.choice(labels)
        records.append(exchange(msg_id=name, task_id=task_id, run_id=run_id))
    for _ in range(320):
        (task_id, run_id), (one, other) = chance.choice(labels), chance.sample(names, 2)
        what: dict[str, Any] = {
            "msg_id": one,
            "task_id": task_id,
            "run_id": run_id,
            "value": float(chance.randrange(9)),
        }
        if chance.random() < 0.2 and None not in (task_id, run_id):
            what["msg_id"] = None
        elif chance.random() < 0.2:
            what |= {"kind": Kind.PREFERENCE, "metric": "preference", "value": None, "other_msg_id": other}
        elif chance.random() < 0.2:
            what |= {"kind": Kind.RETRACTION, "metric": chance.choice(("reward", "preference")), "value": None}
        records.append(feedback(**what))
    chance.shuffle(records)
    groups = [records[first : first + 4] for first in range(0, len(records), 4)]
    found = at_once(*[lambda some=groups[at::4]: [ledger.recording.record(each) for each in some] for at in range(4)])  # type: ignore[misc]
    assert not [each for each in found if isinstance(each, LedgerError)]
    assert sum(ledger.reports.counts().values()) == len(names)
    assert ledger.recording.recompute_rewards(dry_run=True).changed == 0
    with ledger.transactions.snapshot() as connection:
        waiting = select(feedback_table.c.id).where(
            feedback_table.c.outcome == "pending", feedback_table.c.msg_id.is_not(None)
        )
        assert not connection.execute(waiting).all()
