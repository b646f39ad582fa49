"""The ledger's time is the database's; a clock that is set meanwhile is told, and neither ages nor deletes anything."""

import pytest
from sqlalchemy import Engine, text

from tests.doubles.clock import Clock
from tests.factories import exchange, feedback
from tuneloop.shared import steady_time
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.ledger_clock import COMPARE_S, LedgerClock, database_time
from tuneloop.shared.steady_time import Stamp, boot, since_boot

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
        """Let time pass while the process works."""
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
    """Whatever its own process took for the time: it may have been started while the database was away."""
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
    assert began == pytest.approx(steady_time.now() - since_boot(), abs=2.0)
