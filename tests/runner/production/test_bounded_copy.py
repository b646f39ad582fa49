"""Copies in the app's thread take no longer than they may."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runner.feedback.service import FeedbackService
from tests.runner.production.recording import runner_of
from tuneloop.runner.production.bounded_copy import CopyTooLong, bounded_copy, copy_or_same


@pytest.fixture(autouse=True)
def no_garbage_of_others() -> Iterator[None]:
    """What other tests have left is not collected in the time that is measured."""
    gc.disable()
    yield
    gc.enable()


def large() -> list[Any]:
    """Some seconds to copy."""
    return [{"role": "user", "content": [str(number)]} for number in range(300_000)]


def test_a_copy_that_would_take_too_long_is_given_up() -> None:
    thing, started = large(), time.thread_time()
    with pytest.raises(CopyTooLong, match=r"more than 2 ms.*capture_milliseconds"):
        bounded_copy(thing, 0.002)
    assert copy_or_same(thing, 0.002) is thing
    assert time.thread_time() - started < 0.1
    copied = bounded_copy(thing[:10], 1.0)
    assert copied == thing[:10]
    assert copied[0] is not thing[0]


def test_a_call_with_too_much_is_answered_counted_and_not_run_again(service: FeedbackService) -> None:
    given = large()
    with runner_of(service.url) as (runner, results):
        assert runner.wrap(len)(given) == len(given)
        assert runner.wrap(lambda text: given)("a") is given
    counts = runner.counters()
    assert (counts["dropped_too_large"], counts["dropped_not_copied"], counts["completed"]) == (1, 0, 1)
    assert results[0].production_result is given


def test_more_time_may_be_given(service: FeedbackService) -> None:
    given = large()[:5000]
    with runner_of(service.url, capture_milliseconds=60_000) as (runner, results):
        runner.wrap(len)(given)
    assert results[0].call.args == (given,)


LONG = {"floats": [number / 3 for number in range(100_000)], "text": "a" * 1_000_000, "bytes": b"a" * 1_000_000}


@pytest.mark.parametrize("given", LONG.values(), ids=LONG)
def test_arguments_of_a_tool_that_take_long_to_write_are_not_recorded(service: FeedbackService, given: Any) -> None:
    saved: list[Any] = []
    with runner_of(service.url) as (runner, results):
        save = runner.tools.tool(saved.append, name="save")
        started = time.thread_time()
        runner.wrap(lambda: save(given), agent=lambda run: lambda: save(given))()
        assert time.thread_time() - started < 0.02
    assert len(saved) == 1
    assert [each.outcome for each in results[0].tool_calls] == ["refused"]


def test_more_time_may_be_given_for_the_arguments_of_tools(service: FeedbackService) -> None:
    given = [number / 3 for number in range(20_000)]
    with runner_of(service.url, capture_milliseconds=60_000) as (runner, results):
        save = runner.tools.tool(lambda rows: len(rows), name="save")
        runner.wrap(lambda: save(given), agent=lambda run: lambda: save(given))()
    assert results[0].result == 20_000
    assert [each.outcome for each in results[0].tool_calls] == ["recorded"]
