"""A workflow and its judge run once, for whoever writes them: any OpenAI-compatible model, or a service of ours."""

import asyncio
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.key_header import header_of_key
from tuneloop.runner.models.bound_model import CallDefaults, CallsEndpoint, ModelEndpoint, make_model, wanted_client
from tuneloop.runner.models.run import Run
from tuneloop.runner.models.run_calls import RunCalls, StoredCalls
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.tuning.services.service_set import MAIN
from tuneloop.runner.tuning.signatures import check_judge_function, check_workflow_function

_log = logging.getLogger("tuneloop.debug")

#: The service waits itself, until what was answered is stored.
_COUNT_S = 30.0


@dataclass(slots=True, kw_only=True)
class DebugReport:
    """What came of one run. `metrics` are the workflow's and the judge's.

    `calls` are those that `model` made, `stored` what the service knows of all; None where there is no service of ours,
    or it does not say. `own_clients`: whether the workflow can have had calls that only a service would know of.
    """

    response: Any = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: RunCalls = field(default_factory=RunCalls)
    stored: StoredCalls | None = None
    own_clients: bool = False

    @property
    def problem(self) -> str | None:
        """Why nothing would be learnt from such a run, if so."""
        if not self.calls and not (self.own_clients if self.stored is None else self.stored.calls):
            return "it called no model: every run must, through `model`, or through run.base_url and run.api_key"
        if self.reward is None:
            return "it has no reward: return WorkflowOutput(reward=…), or give a judge"
        if not abs(self.reward) <= 1e6:
            return f"its reward is {self.reward}, not a number within ±1e6"
        return None

    def lines(self) -> list[str]:
        """The report, as a person reads it."""
        metrics = " ".join(f"{name}={value:g}" for name, value in self.metrics.items()) or "none"
        calls = [
            f"  {number}. {each.path.rpartition('/v1/')[2] or each.path}: status {each.status}, "
            f"{_count(each.prompt_tokens)} + {_count(each.completion_tokens)} tokens, {each.duration_s:.2f} s"
            f"{'' if each.model_version is None else f', version {each.model_version}'}, {each.msg_id or 'no id'}"
            for number, each in enumerate(self.calls, start=1)
        ]
        total = f"{self.calls.prompt_tokens} + {self.calls.completion_tokens} tokens (prompt + reply)"
        return [
            f"response: {_text_of(self.response)}",
            f"reward: {'none' if self.reward is None else f'{self.reward:g}'}",
            f"metrics: {metrics}",
            f"calls: {len(self.calls)}, {total}",
            *calls,
            *self._stored_lines(),
        ]

    def _stored_lines(self) -> Iterator[str]:
        if self.stored is None:
            if self.own_clients and not self.calls:
                yield "calls by clients of the workflow's own are not known here: only a service of ours knows them"
            return
        if others := self.stored.calls - len(self.calls):
            yield f"calls by clients of the workflow's own: {others}"
        sequences = "1 sequence" if self.stored.sequences == 1 else f"{self.stored.sequences} sequences"
        yield f"in training: {self.stored.merged_tokens} tokens in {sequences}, of {self.stored.tokens} call by call"


def debug_run(
    workflow: Callable[..., Any],
    task: Mapping[str, Any],
    bound: CallsEndpoint,
    defaults: CallDefaults,
    *,
    judge: Callable[..., Any] | None = None,
    auxiliary: Mapping[str, CallDefaults] | None = None,
) -> DebugReport:
    """Run them once; an exception of theirs is raised as it is. Raises TuneRefused for wrong signatures.

    Auxiliary models are asked where the model itself is, and their calls are not in the report.
    """
    check_workflow_function(workflow)
    if judge is not None:
        check_judge_function(judge)
    kind, sync = wanted_client(workflow)
    elsewhere = ModelEndpoint(base_url=bound.base_url, api_key=bound.api_key)
    others = {name: make_model(elsewhere, each, client=kind, sync=sync) for name, each in (auxiliary or {}).items()}
    offered = {
        "task": dict(task),
        "model": make_model(bound, defaults, client=kind, sync=sync),
        "auxiliary_models": others,
        "logger": _log,
        "run": bound,
        "runs": {MAIN: bound},
    }
    report = DebugReport(calls=bound.calls)
    asyncio.run(_run(workflow, judge, offered, report))
    report.own_clients = not {"run", "runs"}.isdisjoint(inspect.signature(workflow).parameters)
    report.stored = _stored_calls(bound) if isinstance(bound, Run) else None
    return report


def _stored_calls(run: Run) -> StoredCalls | None:
    """What the service knows of the run's calls."""
    query = {"task_id": run.task_id, "run_id": run.run_id, "tokens": "true"}
    url = f"{run.service.rstrip('/')}/training/calls"
    try:
        answer = httpx.get(url, params=query, headers=header_of_key(run.api_key), timeout=_COUNT_S)
        return StoredCalls.of(answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError, LookupError) as error:
        _log.warning("the service does not say how many calls there were: %s", error)
        return None


async def _run(
    workflow: Callable[..., Any], judge: Callable[..., Any] | None, offered: dict[str, Any], report: DebugReport
) -> None:
    try:
        output = await _call(workflow, offered)
        plain = isinstance(output, int | float)
        report.response = None if plain else getattr(output, "response", output)
        reward = output if plain else getattr(output, "reward", None)
        report.metrics.update(getattr(output, "metrics", None) or {})
        if judge is not None:
            verdict = await _call(judge, {**offered, "response": report.response})
            reward = verdict if isinstance(verdict, int | float) else verdict.reward
            report.metrics.update(getattr(verdict, "metrics", None) or {})
        report.reward = None if reward is None else float(reward)
    finally:
        await close_connections()


async def _call(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    taken = inspect.signature(function).parameters
    arguments = {name: value for name, value in offered.items() if name in taken}
    called = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is async
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        return await function(**arguments)
    returned = await asyncio.to_thread(function, **arguments)
    return await returned if inspect.isawaitable(returned) else returned


def load_function(place: str, beside: str | None = None) -> Callable[..., Any]:
    """The function at FILE:FUNCTION; `beside` is the file where the file is left out. Raises TuneRefused."""
    file, colon, name = place.rpartition(":")
    file = file or (beside or "")
    if not file or not name or (not colon and beside is None):
        raise TuneRefused(f"{place!r} is not FILE:FUNCTION")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise TuneRefused(f"{file}: there is no such file")
    module = _load(path)
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        functions = ", ".join(sorted(key for key, each in vars(module).items() if inspect.isfunction(each)))
        raise TuneRefused(f"{file}: there is no {name!r} in it; there are the functions {functions or '(none)'}")
    function: Callable[..., Any] = found
    return function


def _load(path: Path) -> Any:
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TuneRefused(f"{path}: this is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _text_of(response: Any) -> str:
    if isinstance(response, str):
        return response
    read_text = getattr(response, "get_text_content", None)  # of AgentScope's messages
    if callable(read_text):
        return str(read_text())
    try:
        return json.dumps(response, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(response)


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)
