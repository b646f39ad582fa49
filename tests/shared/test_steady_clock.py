import pytest

from tests.doubles.clock import Clock
from tuneloop.shared.experience import SteadyClock


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_a_step_of_the_clock_changes_nothing(clock: Clock, step: float) -> None:
    ticks = Clock(5.0)
    now = SteadyClock(clock, ticks)
    clock.now += step
    ticks.now += 3.0
    assert now() == 1003.0
