"""Marks: which call they are of, in threads, in tasks and in blocks."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context

import pytest

from tests.runner.feedback.service import FeedbackService
from tests.runner.shadow.recording import Seen, runner_of
from tuneloop.runner import ExplicitMarkingStrategy, TrainingContext


@pytest.fixture
def seen(service: FeedbackService) -> Seen:
    return Seen(service.url, ExplicitMarkingStrategy.create())


def test_a_mark_is_of_the_next_call_alone(seen: Seen) -> None:
    with seen:
        seen.ask("a")
        TrainingContext.mark("high-quality", "user-feedback")
        seen.ask("b")
        seen.ask("c")
    assert seen.marks() == {"b": ("high-quality", "user-feedback")}


def test_a_block_marks_all_of_its_calls(seen: Seen) -> None:
    with seen:
        with TrainingContext.mark("outer"):
            seen.ask("a")
            with TrainingContext.mark("inner"):
                seen.ask("b")
            seen.ask("c")
        seen.ask("d")
    assert seen.marks() == {"a": ("outer",), "b": ("outer", "inner"), "c": ("outer",)}
    assert TrainingContext.marks() == ()


async def test_tasks_do_not_see_each_others_marks(seen: Seen) -> None:
    async def one(number: int) -> None:
        if number % 2:
            TrainingContext.mark(f"m{number}")
        await asyncio.sleep(0.01)
        await seen.ask_async(str(number))

    with seen:
        await asyncio.gather(*(one(number) for number in range(10)))
    assert seen.marks() == {str(number): (f"m{number}",) for number in range(1, 10, 2)}


IN_A_CALL: list[Callable[[], object]] = [
    lambda: TrainingContext.mark("late"),
    lambda: copy_context().run(TrainingContext.mark, "late"),
]


@pytest.mark.parametrize("mark", IN_A_CALL)
def test_what_is_marked_while_a_call_runs_is_of_this_call(service: FeedbackService, mark: Callable[[], object]) -> None:
    with runner_of(service.url, ExplicitMarkingStrategy.create(during_call=True)) as (runner, results):
        marking = runner.wrap(lambda text: mark() and text if text == "a" else text)
        for text in "ab":
            assert marking(text) == text
    assert [(each.call.args, each.call.marks) for each in results] == [(("a",), ("late",))]
