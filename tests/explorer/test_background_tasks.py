"""The one loop of all periodic tasks: what passes is logged twice, a bug is counted, and either way it goes on."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from tuneloop.explorer.background_tasks import every
from tuneloop.explorer.metrics import Metrics
from tuneloop.shared.errors import EnvironmentRefused, LedgerUnavailable


def turns(*outcomes: Exception | float | None) -> tuple[list[float], Callable[[], Awaitable[float | None]]]:
    """A turn that ends in these ways, one after the other, and then waits; and when each began."""
    began: list[float] = []
    left = list(outcomes)

    async def turn() -> float | None:
        began.append(asyncio.get_running_loop().time())
        if not left:
            await asyncio.Event().wait()
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return began, turn


async def run(*outcomes: Exception | float | None, seconds: float = 0.0) -> tuple[list[float], Metrics]:
    """Let the loop come to the turn after these, then cancel it."""
    metrics = Metrics()
    began, turn = turns(*outcomes)
    running = asyncio.ensure_future(every(seconds, turn, task="retention", metrics=metrics))
    async with asyncio.timeout(60):
        while len(began) <= len(outcomes) and not running.done():  # noqa: ASYNC110 - the loop itself has no event
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return began, metrics


def failures(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("tuneloop_background_failures_total", {"task": "retention"})


async def test_a_bug_is_logged_with_its_traceback_and_counted_and_the_next_turn_comes() -> None:
    with capture_logs() as logs:
        _, metrics = await run(RuntimeError("a bug"), KeyError("another"), None)
    assert failures(metrics) == 2
    assert [(each["event"], each["task"], each["exc_info"]) for each in logs] == [
        ("background_task_failed", "retention", True)
    ] * 2


async def test_a_task_without_bugs_has_a_count_of_zero() -> None:
    _, metrics = await run(None)
    assert failures(metrics) == 0


async def test_a_database_that_is_away_is_logged_when_it_begins_and_when_it_is_over() -> None:
    away = LedgerUnavailable("no answer")
    with capture_logs() as logs:
        _, metrics = await run(None, away, away, away, None, None, away)
    assert [each["event"] for each in logs] == ["database_away", "database_back", "database_away"]
    assert failures(metrics) == 0


async def test_a_turn_may_say_when_the_next_one_is_due() -> None:
    began, _ = await run(0.0, 0.2, None, seconds=0.05)
    pauses = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert pauses[1] >= 0.19
    assert pauses[2] >= 0.04


async def test_what_no_turn_cures_ends_the_task() -> None:
    _, turn = turns(EnvironmentRefused("another experiment's database"))
    with pytest.raises(EnvironmentRefused):
        await every(0.0, turn, task="retention", metrics=Metrics())
