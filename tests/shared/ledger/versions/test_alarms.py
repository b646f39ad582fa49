"""What the monitors say is wrong: raised once, held against new versions, cleared."""

import math

import pytest
from sqlalchemy import Engine

from tuneloop.shared.ledger.ledger import Alarm, Ledger


@pytest.fixture
def clocked(engine: Engine) -> Ledger:
    return Ledger(engine, clock=lambda: 50.0)


def test_an_alarm_that_is_open_stays_as_it_is_and_takes_only_whether_it_holds(clocked: Ledger) -> None:
    first = Alarm("length", "replies got long", step=3, value=1.5)
    clocked.alarms.raise_alarm(first)
    assert not clocked.alarms.raise_alarm(Alarm("length", "another reason", step=4, value=9.0, holds=True))
    assert clocked.alarms.all() == [first._replace(raised_at=50.0, holds=True)]


def test_a_cleared_alarm_is_kept_and_may_be_raised_again(clocked: Ledger) -> None:
    clocked.alarms.raise_alarm(Alarm("length", "once"))
    assert clocked.alarms.clear("length")
    assert clocked.alarms.all() == []
    assert not clocked.alarms.clear("length")
    assert clocked.alarms.raise_alarm(Alarm("length", "twice"))
    assert [(each.reason, each.cleared_at) for each in clocked.alarms.all(cleared=True)] == [
        ("once", 50.0),
        ("twice", None),
    ]


def test_promotion_is_held_while_an_alarm_that_holds_is_open(clocked: Ledger) -> None:
    assert not clocked.alarms.promotion_held()
    clocked.alarms.raise_alarm(Alarm("entropy", "drifted"))
    assert not clocked.alarms.promotion_held()
    clocked.alarms.raise_alarm(Alarm("length", "drifted", holds=True))
    assert clocked.alarms.promotion_held()
    clocked.alarms.raise_alarm(Alarm("length", "drifted", holds=False))
    assert not clocked.alarms.promotion_held()
    clocked.alarms.raise_alarm(Alarm("length", "drifted", holds=True))
    clocked.alarms.clear("length")
    assert not clocked.alarms.promotion_held()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_alarm_about_what_is_no_number_is_raised_without_it(clocked: Ledger, value: float) -> None:
    clocked.alarms.raise_alarm(Alarm("loss", "the loss is no number", value=value, threshold=value))
    assert [(each.value, each.threshold) for each in clocked.alarms.all()] == [(None, None)]
