"""Functions that can be workflows and judges, and what is said of those that cannot."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tuning.config import check_judge_function, check_workflow_function


async def as_in_the_seed(task, model, auxiliary_models=None): ...


async def with_a_logger(task, model, auxiliary_models, logger): ...


def plain(task, model): ...


def with_all(
    task: dict[str, Any], model: Any, *, run: Any, auxiliary_models: Any = None, logger: Any = None
) -> None: ...


def with_clients_of_its_own(task, run): ...


def with_several_runs(task, runs): ...


def with_options(task, model, depth=3): ...


def with_a_tool(task, model, tool): ...


class Callable_:
    async def __call__(self, task, model): ...

    async def method(self, task, model): ...


GOOD = [
    as_in_the_seed,
    with_a_logger,
    plain,
    with_all,
    with_options,
    with_clients_of_its_own,
    with_several_runs,
    partial(with_a_tool, tool=1),
    Callable_(),
    Callable_().method,
    lambda task, model: None,
]


@pytest.mark.parametrize("function", GOOD)
def test_these_are_workflows(function: Callable[..., Any]) -> None:
    check_workflow_function(function)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda question, model: None, "has no parameter task; requires question, which is not passed"),
        (lambda task: None, "has no parameter model or run or runs"),
        (with_a_tool, "requires tool, which is not passed"),
        (lambda task, model, *args: None, r"takes \*args"),
        (lambda task, model, **kwargs: None, r"takes \*kwargs"),
        (lambda task, model, /: None, "takes task by position only"),
        (Callable_, "is the class Callable_; give an instance"),
        ("workflow", "is 'workflow', not a function"),
        (None, "is None, not a function"),
    ],
)
def test_these_are_not_and_the_right_one_is_shown(function: Any, why: str) -> None:
    with pytest.raises(TuneRefused, match=why) as refused:
        check_workflow_function(function)
    assert "async def workflow(task, model, auxiliary_models=None" in str(refused.value) or function is Callable_


def test_judges() -> None:
    async def good(task, response, auxiliary_models): ...
    def wrong(task, model): ...

    check_judge_function(good)
    with pytest.raises(TuneRefused, match=r"judge .*wrong\(task, model\) has no parameter response; requires") as no:
        check_judge_function(wrong)
    assert "async def judge(task, response," in str(no.value)
