"""Whether a function can be a workflow or a judge, which is looked at before anything is started."""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

from tuneloop.runner.errors import TuneRefused

_Needed = tuple[tuple[str, ...], ...]

#: What each is called with by name: what it must take (one of each group), and what it gets if it asks for it.
_WORKFLOW = (("task",), ("model", "run", "runs")), ("auxiliary_models", "logger")
_JUDGE = (("task",), ("response",)), ("auxiliary_models", "logger", "run", "runs")

_SHOWN = {
    "workflow": "async def workflow(task, model, auxiliary_models=None, logger=None, run=None) -> WorkflowOutput",
    "judge": "async def judge(task, response, auxiliary_models=None, logger=None, run=None) -> JudgeOutput",
}


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise TuneRefused unless the function takes what a workflow is called with.

    One that binds clients of its own to `run` or `runs` needs no `model`.
    """
    _check(function, "workflow", *_WORKFLOW)


def check_judge_function(function: Callable[..., Any]) -> None:
    """Raise TuneRefused unless the function takes what a judge is called with."""
    _check(function, "judge", *_JUDGE)


def _check(function: Callable[..., Any], kind: str, needed: _Needed, offered: tuple[str, ...]) -> None:
    if not callable(function):
        raise TuneRefused(f"the {kind} is {function!r}, not a function; it should be\n    {_SHOWN[kind]}")
    if inspect.isclass(function):
        raise TuneRefused(f"the {kind} is the class {function.__name__}; give an instance of it, or a function")
    problems = _problems(function, needed, offered)
    if problems:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        written = _signature_text(function)
        raise TuneRefused(
            f"the {kind} {name}{written} {'; '.join(problems)}. It is called by name, and should be\n"
            f"    {_SHOWN[kind]}\nwhere all that has a default, and async, may be left out"
        )


def _problems(function: Callable[..., Any], needed: _Needed, offered: tuple[str, ...]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ["has a signature that cannot be read"]
    wild = [name for name, each in parameters.items() if each.kind in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
    problems = [f"has no parameter {' or '.join(names)}" for names in needed if not {*names} & {*parameters}]
    problems += [f"takes {name} by its place only" for name in by_place]
    problems += [f"takes *{name}, which nothing is passed in" for name in wild]
    others = [
        name
        for name, each in parameters.items()
        if name not in {*chain(*needed), *offered, *wild, *by_place} and each.default is each.empty
    ]
    return problems + [f"wants {name}, which it will not get" for name in others]


def _signature_text(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""
