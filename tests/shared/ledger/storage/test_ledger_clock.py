"""The ledger's time stays what it is, whatever clock is set, on whichever machine."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from tests.doubles.clock import Clock
from tests.factories import exchange, feedback
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.ledger_clock import COMPARE_S, PULL, LedgerClock, Machine, database_time
from tuneloop.shared.steady_time import Stamp, boot, since_boot

DAY = 86400.0
START = 1_800_000_000.0


@dataclass
class World:
    """True time, which the test lets pass, and the clock of the machine with the database, which it sets."""

    engine: Engine
    true: Clock = field(default_factory=lambda: Clock(START))
    wrong_by: float = 0.0
    boots: "count[int]" = field(default_factory=count)

    def machine(self, boot: str | None = None, began: float | None = None) -> Machine:
        """A machine that was started now, or that was started as `boot` before."""
        name, began = boot or f"boot-{next(self.boots)}", self.true.now if began is None else began

        def database(_connection: Connection) -> float:
            return self.true.now + self.wrong_by

        return Machine(boot=lambda: name, ticks=lambda: self.true.now - began, database=database)

    def ledger(self, machine: Machine) -> Ledger:
        """The ledger as a process that starts now on the machine sees it, after its first write."""
        ledger = Ledger(self.engine, clock=LedgerClock(self.engine, machine))
        ledger.transactions.keep_time()
        return ledger

    def pass_s(self, seconds: float, *ledgers: Ledger) -> None:
        """Let time pass, while processes use these ledgers."""
        until = self.true.now + seconds
        while self.true.now < until:
            self.true.now = min(until, self.true.now + COMPARE_S)
            for each in ledgers:
                each.transactions.keep_time()


@pytest.fixture
def world(engine: Engine) -> World:
    return World(engine)


def off(world: World, ledger: Ledger) -> float:
    return ledger.transactions.time() - world.true.now


@pytest.mark.parametrize("step", [DAY, -DAY, 3600.0, -3600.0])
def test_the_databases_clock_that_is_set_changes_nothing(world: World, step: float) -> None:
    machine = world.machine()
    running = world.ledger(machine)
    world.pass_s(60.0, running)
    world.wrong_by = step
    world.pass_s(600.0, running)
    most = 600 * PULL + 0.01
    assert abs(off(world, running)) <= most
    assert abs(off(world, world.ledger(machine))) <= most  # a process that starts only now
    assert abs(off(world, world.ledger(world.machine()))) <= most  # a machine, too: another knows better


@pytest.mark.parametrize("wrong_by", [DAY, -DAY])
def test_whoever_comes_later_has_the_time_of_the_first(world: World, wrong_by: float) -> None:
    """The first knows no better than the clock it asks; what counts is that everybody has the same time."""
    world.wrong_by = wrong_by
    first = world.ledger(world.machine())
    world.wrong_by = 0.0
    world.pass_s(30.0, first)
    others = [world.ledger(world.machine()) for _ in range(3)]
    world.pass_s(600.0, first, *others)
    times = [off(world, each) for each in [first, *others]]
    assert max(times) - min(times) < 0.05


def test_after_all_machines_were_started_anew_time_never_goes_back(world: World) -> None:
    first = world.ledger(world.machine())
    world.pass_s(600.0, first)
    before = first.transactions.time()
    world.wrong_by = -DAY
    world.true.now += 300.0
    assert world.ledger(world.machine()).transactions.time() >= before - COMPARE_S


def test_clocks_that_run_differently_are_followed(world: World) -> None:
    ledger = world.ledger(world.machine())
    for _ in range(50):
        world.wrong_by += 0.005
        world.pass_s(10.0, ledger)
    assert off(world, ledger) == pytest.approx(world.wrong_by, abs=0.02)


def test_a_process_that_stood_still_is_pulled_no_more_than_for_one_look(world: World) -> None:
    ledger = world.ledger(world.machine())
    world.wrong_by = DAY
    world.true.now += DAY
    ledger.transactions.keep_time()
    assert abs(off(world, ledger)) <= PULL * COMPARE_S + 0.01


def test_who_only_reads_is_told_the_time_and_writes_nothing(world: World) -> None:
    reader = Ledger(world.engine, clock=LedgerClock(world.engine, world.machine()))
    world.true.now += 5.0
    assert abs(off(world, reader)) < 0.01
    with world.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM clocks")).scalar() == 0


def test_a_database_that_forbids_it_is_asked_each_time(world: World, engine: Engine) -> None:
    sqlite = engine.dialect.name == "sqlite"
    forbid = "PRAGMA query_only = ON" if sqlite else "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"

    @event.listens_for(engine, "checkout")
    def _on_checkout(connection: Any, _record: object, _proxy: object) -> None:
        connection.execute(forbid)
        if not sqlite:
            connection.commit()

    ledger = world.ledger(world.machine())
    world.true.now += 5.0
    assert abs(off(world, ledger)) < 0.01
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM clocks")).scalar() == 0


def test_a_record_is_dated_by_its_machines_start(world: World) -> None:
    """Whatever its own process took for the time: it may have been started while the database was away."""
    ledger = world.ledger(world.machine("here", began=START - 1000.0))
    late, early = (exchange(received_at=START + wrong, stamp=Stamp("here", 900.0)) for wrong in (DAY, -DAY))
    elsewhere = exchange(received_at=START - 7.0, stamp=Stamp("a machine that never wrote", 5.0))
    event = feedback(msg_id=late.msg_id, received_at=START + DAY, stamp=Stamp("here", 950.0))
    ledger.recording.record([late, early, elsewhere, event])
    with world.engine.connect() as connection:
        for table, column in (("exchanges", "received_at"), ("experiences", "sampled_at")):
            found = {row[0]: row[1] for row in connection.execute(text(f"SELECT msg_id, {column} FROM {table}"))}
            assert found[late.msg_id] == found[early.msg_id] == pytest.approx(START - 100.0, abs=0.01)
            assert found[elsewhere.msg_id] == START - 7.0
        [said] = connection.execute(text("SELECT received_at FROM feedback")).scalars()
        assert said == pytest.approx(START - 50.0, abs=0.01)


def test_retention_deletes_by_true_age_whatever_the_databases_clock_says(world: World) -> None:
    ledger = world.ledger(world.machine("here", began=START))
    ledger.recording.record([exchange(stamp=Stamp("here", age)) for age in (0.0, 3000.0)])
    world.pass_s(3600.0, ledger)
    world.wrong_by = DAY
    restarted = world.ledger(world.machine("here", began=START))
    restarted.retention.purge({State.RECORDED: 1200.0})
    assert restarted.reports.counts()[State.RECORDED] == 1


def test_the_real_time_of_this_machine_is_the_databases(engine: Engine) -> None:
    ledger = Ledger(engine, clock=LedgerClock(engine))
    ledger.transactions.keep_time()
    with engine.connect() as connection:
        assert ledger.transactions.time() == pytest.approx(database_time(connection), abs=2.0)
        began = connection.execute(text("SELECT began_at FROM clocks WHERE boot = :boot"), {"boot": boot()}).scalar()
    assert began == pytest.approx(ledger.transactions.time() - since_boot(), abs=0.1)
    assert abs(ledger.transactions.clock_skew()) < 2.0
