"""The ledger's time is the database's; a clock that is set meanwhile is told, and neither ages nor deletes anything."""

import pytest
from sqlalchemy import Engine, text

from tests.doubles.clock import Clock
from tests.factories import exchange, feedback
from tuneloop.shared.experience import Kind, Stamp, State, boot, since_boot, steady_clock
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.clock import COMPARE_S, ClockSkew, LedgerClock, database_time

DAY = 86400.0
START = 1_800_000_000.0


class World:
    """The seconds since this machine was started, and by how much the database's clock is wrong."""

    def __init__(self, engine: Engine) -> None:
        self.ticks, self.wrong_by = Clock(5000.0), 0.0
        clock = LedgerClock(engine, ticks=self.ticks, database=lambda _: START + self.ticks.now + self.wrong_by)
        self.ledger = Ledger(engine, clock=clock)
        self.ledger.transactions.keep_time()

    def pass_s(self, seconds: float) -> None:
        until = self.ticks.now + seconds
        while self.ticks.now < until:
            self.ticks.now += COMPARE_S
            self.ledger.transactions.keep_time()

    def off(self) -> float:
        return self.ledger.transactions.time() - START - self.ticks.now


@pytest.fixture
def world(engine: Engine) -> World:
    return World(engine)


@pytest.mark.contract
@pytest.mark.parametrize("step", [DAY, -DAY])
def test_a_clock_that_is_set_is_told_and_deletes_nothing(world: World, step: float) -> None:
    world.ledger.recording.record([exchange(stamp=Stamp(boot(), age)) for age in (1000.0, 4900.0)])
    world.wrong_by = step
    world.pass_s(60.0)
    assert world.off() == 0.0
    assert world.ledger.transactions.clock_skew() == step
    world.ledger.retention.purge({State.RECORDED: 1200.0})
    assert world.ledger.reports.counts()[State.RECORDED] == 1
    world.wrong_by = 0.0
    world.pass_s(COMPARE_S)
    assert world.ledger.transactions.clock_skew() == 0.0


def test_a_record_is_dated_by_its_machines_start(world: World) -> None:
    late, early = (exchange(received_at=START + wrong, stamp=Stamp(boot(), 900.0)) for wrong in (DAY, -DAY))
    elsewhere = exchange(received_at=START - 7.0, stamp=Stamp("another start", 5.0))
    event = feedback(msg_id=late.msg_id, received_at=START + DAY, stamp=Stamp(boot(), 950.0))
    world.ledger.recording.record([late, early, elsewhere, event])
    with world.ledger.transactions.engine.connect() as connection:
        for table, column in (("exchanges", "received_at"), ("experiences", "sampled_at")):
            found = {row[0]: row[1] for row in connection.execute(text(f"SELECT msg_id, {column} FROM {table}"))}
            assert found[late.msg_id] == found[early.msg_id] == START + 900.0
            assert found[elsewhere.msg_id] == START - 7.0
        assert connection.execute(text("SELECT received_at FROM feedback")).scalars().all() == [START + 950.0]


def test_the_real_time_of_this_machine_is_the_databases(engine: Engine) -> None:
    ledger = Ledger(engine, clock=LedgerClock(engine))
    with engine.connect() as connection:
        assert ledger.transactions.time() == pytest.approx(database_time(connection), abs=2.0)
    began = ledger.transactions.boot_time()
    assert began == pytest.approx(steady_clock() - since_boot(), abs=2.0)


@pytest.mark.contract
def test_explorers_whose_clocks_are_a_minute_apart_stamp_the_same_time(engine: Engine) -> None:
    """Each knows by the database's clock when its machine was started."""
    said = []
    for began, wrong in ((4000.0, 60.0), (900.0, -60.0)):
        ticks = Clock(5000.0 - began)
        clock = LedgerClock(engine, ticks=ticks, database=lambda _: START + 5000.0)
        said.append(exchange(received_at=START + 4999.0 + wrong, stamp=Stamp(boot(), ticks.now - 1.0)))
        Ledger(engine, clock=clock).recording.record(said[-1:])
    with engine.connect() as connection:
        found = connection.execute(text("SELECT received_at FROM exchanges")).scalars().all()
    assert found == [START + 4999.0] * 2


@pytest.mark.parametrize("step", [-86400.0, -2.0, 86400.0])
def test_a_correction_counts_whatever_the_clock_of_its_process_says(world: World, step: float) -> None:
    said = exchange(stamp=Stamp(boot(), 1.0))
    world.ledger.recording.record([said])
    words = [{"value": 0.9}, {"value": 0.1}, {"value": 0.9}, {"value": None, "kind": Kind.RETRACTION}]
    for number, word in enumerate(words):
        at = {"received_at": 1e9 + number * step, "stamp": Stamp(boot(), 10.0 + number)}
        world.ledger.recording.record([feedback(msg_id=said.msg_id, **at, **word)])
        with world.ledger.transactions.engine.connect() as connection:
            assert connection.execute(text("SELECT reward FROM experiences")).scalars().all() == [word["value"]]


def test_the_estimate_is_that_of_the_quickest_answer_until_another_one_differs_by_more_than_its_doubt(
    engine: Engine,
) -> None:
    ticks, ahead = Clock(5000.0), Clock(0.0)
    delays = iter([0.4, 0.2, 0.01, 0.3, 0.4, 0.06, 0.06, 0.0])

    def answer(_: object) -> float:
        now = START + ticks.now + ahead.now
        ticks.now += next(delays)
        return now

    clock = LedgerClock(engine, ticks=ticks, database=answer)
    assert clock.began == pytest.approx(START - 0.005)
    for ahead.now, began in ((0.0, START - 0.005), (2.0, START + 1.97), (2.0, START + 2.0)):
        ticks.now += COMPARE_S
        assert clock.compare() == pytest.approx(began)


@pytest.mark.parametrize(("off", "wrong"), [(0.9, False), (1.0, True), (-1.0, True)])
def test_a_clock_that_is_a_second_off_is_told(off: float, wrong: bool) -> None:
    assert ClockSkew(off, 0.0).wrong is ClockSkew(0.0, off).wrong is wrong
    assert ("right, the" in ClockSkew(off, 0.0).sentence) is not wrong
