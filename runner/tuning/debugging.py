"""Runs a workflow and its judge once before training: the command tuneloop debug."""

import argparse
import asyncio
import importlib.util
import inspect
import io
import json
import logging
import math
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.models.bound_model import CallDefaults, CallsEndpoint, ModelEndpoint, make_model, wanted_client
from tuneloop.runner.models.run import Run, RunCalls, StoredCalls
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.attempts import call_within, matching
from tuneloop.runner.tuning.config import MAIN, check_judge_function, check_workflow_function

_log = logging.getLogger("tuneloop.debug")

_COUNT_S = 30.0  # the service itself waits until replies are stored


@dataclass(slots=True, kw_only=True)
class DebugReport:
    """The result of one run. `metrics` are the workflow's and the judge's.

    `calls` are those of `model`; `stored` counts all calls in the service, None without a service of ours.
    `own_clients`: whether the workflow may have called the service by other clients.
    """

    response: Any = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: RunCalls = field(default_factory=RunCalls)
    stored: StoredCalls | None = None
    own_clients: bool = False

    @property
    def problem(self) -> str | None:
        if not self.calls and not (self.own_clients if self.stored is None else self.stored.calls):
            return "it called no model: every run must, through `model`, or through run.base_url and run.api_key"
        if self.reward is None:
            return "it has no reward: return WorkflowOutput(reward=…), or give a judge"
        if not abs(self.reward) <= 1e6:
            return f"its reward is {self.reward}, not a number within ±1e6"
        return None

    def lines(self) -> list[str]:
        metrics = " ".join(f"{name}={value:g}" for name, value in self.metrics.items()) or "none"
        calls = [
            f"  {number}. {each.path.rpartition('/v1/')[2] or each.path}: status {each.status}, "
            f"{_count(each.prompt_tokens)} + {_count(each.completion_tokens)} tokens, {each.duration_s:.2f} s"
            f"{'' if each.model_version is None else f', version {each.model_version}'}, {each.msg_id or 'no id'}"
            for number, each in enumerate(self.calls, start=1)
        ]
        total = f"{self.calls.prompt_tokens} + {self.calls.completion_tokens} tokens (prompt + reply)"
        found = []
        if self.stored is not None:
            if others := self.stored.calls - len(self.calls):
                found.append(f"calls by clients of the workflow's own: {others}")
            sequences = "1 sequence" if self.stored.sequences == 1 else f"{self.stored.sequences} sequences"
            merged, tokens = self.stored.merged_tokens, self.stored.tokens
            found.append(f"in training: {merged} tokens in {sequences}, of {tokens} call by call")
            found += [f"  {sentence}" for sentence in self.stored.breaks]
        elif self.own_clients and not self.calls:
            found.append("calls by clients of the workflow's own are unknown here: only a tuneloop service knows them")
        read_text = getattr(self.response, "get_text_content", None)  # AgentScope's messages
        if isinstance(self.response, str):
            text = self.response
        elif callable(read_text):
            text = str(read_text())
        else:
            try:
                text = json.dumps(self.response, ensure_ascii=False)
            except (TypeError, ValueError):
                text = repr(self.response)
        return [
            f"response: {text}",
            f"reward: {'none' if self.reward is None else f'{self.reward:g}'}",
            f"metrics: {metrics}",
            f"calls: {len(self.calls)}, {total}",
            *calls,
            *found,
        ]


def debug_run(
    workflow: Callable[..., Any],
    task: Mapping[str, Any],
    bound: CallsEndpoint,
    defaults: CallDefaults,
    *,
    judge: Callable[..., Any] | None = None,
    auxiliary: Mapping[str, CallDefaults] | None = None,
) -> DebugReport:
    """Run the workflow once; its and the judge's exceptions propagate. Raises TuneRefused for wrong signatures."""
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

    async def run() -> None:
        try:
            output = await call_within(math.inf, workflow, matching(workflow, offered))
            plain = isinstance(output, int | float)
            report.response = None if plain else getattr(output, "response", output)
            reward = output if plain else getattr(output, "reward", None)
            report.metrics.update(getattr(output, "metrics", None) or {})
            if judge is not None:
                verdict = await call_within(math.inf, judge, matching(judge, {**offered, "response": report.response}))
                reward = verdict if isinstance(verdict, int | float) else verdict.reward
                report.metrics.update(getattr(verdict, "metrics", None) or {})
            report.reward = None if reward is None else float(reward)
        finally:
            await close_connections()

    asyncio.run(run())
    report.own_clients = not {"run", "runs"}.isdisjoint(inspect.signature(workflow).parameters)
    if isinstance(bound, Run):
        query = {"task_id": bound.task_id, "run_id": bound.run_id, "tokens": "true"}
        url = f"{bound.service.rstrip('/')}/training/calls"
        try:
            answer = httpx.get(url, params=query, headers=header_of_key(bound.api_key), timeout=_COUNT_S)
            report.stored = StoredCalls.of(answer.raise_for_status().json())
        except (httpx.HTTPError, ValueError, LookupError) as error:
            _log.warning("the service does not report the number of calls: %s", error)
    return report


def load_function(place: str, beside: str | None = None) -> Callable[..., Any]:
    """The function FILE:FUNCTION or MODULE:FUNCTION; `beside` is the default file. Raises TuneRefused."""
    file, colon, name = place.rpartition(":")
    file = file or (beside or "")
    if not file or not name or (not colon and beside is None):
        raise TuneRefused(f"{place!r} is not FILE:FUNCTION")
    path = Path(file).expanduser().resolve()
    module: Any = None
    if not path.is_file():
        sys.path.insert(0, "")
        try:
            module = importlib.import_module("" if path.suffix == ".py" else file)
        except (ModuleNotFoundError, ValueError) as error:
            what = error if isinstance(error, ModuleNotFoundError) else "there is no such file"
            raise TuneRefused(f"{file}: {what}") from None
        finally:
            sys.path.remove("")
    module = module or sys.modules.get(path.stem)
    if path.is_file() and getattr(module, "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise TuneRefused(f"{path}: this is not a Python file")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        functions = ", ".join(sorted(key for key, each in vars(module).items() if inspect.isfunction(each)))
        raise TuneRefused(f"{file}: there is no {name!r} in it; there are the functions {functions or '(none)'}")
    function: Callable[..., Any] = found
    return function


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


_PROG = "tuneloop debug"

_MODELS_TIMEOUT_S = 30.0  # timeout of the request for the list of models, in seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0, 1 if the workflow failed or the run is unusable, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("workflow", metavar="FILE:FUNCTION")
    parser.add_argument("--judge", metavar="FUNCTION", help="of the same file, or FILE:FUNCTION")
    parser.add_argument("--task", metavar="JSON", help="an object; @FILE reads it from a file")
    parser.add_argument("--dataset", metavar="PATH", help="instead of --task: the task comes from there")
    parser.add_argument("--split", default="train")
    parser.add_argument("--index", type=int, default=0, help="index of the task in the dataset, from 0")
    add_model_options(parser)
    options = parser.parse_args(argv)
    if (options.task is None) == (options.dataset is None):
        parser.error("give a task with --task, or a dataset with --dataset")
    try:
        workflow = load_function(options.workflow)
        judge = None if options.judge is None else load_function(options.judge, options.workflow.rpartition(":")[0])
        if options.dataset is not None:
            task = task_at(DatasetConfig(options.dataset, split=options.split), options.index)
        else:
            text = Path(options.task[1:]).read_text("utf-8") if options.task.startswith("@") else options.task
            try:
                task = json.loads(text)
            except ValueError as error:
                raise TuneRefused(f"--task is not JSON: {error}") from None
            if not isinstance(task, dict):
                raise TuneRefused("--task must be a JSON object")
        return debug(workflow, task, options, judge=judge)
    except (TuneRefused, ExtraMissing) as error:
        print(error, file=sys.stderr)
        return 2


def debug(
    workflow: Callable[..., Any],
    task: dict[str, Any],
    options: argparse.Namespace,
    *,
    judge: Callable[..., Any] | None = None,
) -> int:
    """Run a workflow on a task with the model of the options, print the report, and return the exit code."""
    bound: CallsEndpoint
    if options.service is not None:
        run_id = uuid.uuid4().hex
        bound = Run(service=options.service, task_id="debug", run_id=run_id, train=False, api_key=options.api_key)
    elif options.base_url is not None:
        bound = ModelEndpoint(base_url=options.base_url, api_key=options.api_key)
    else:
        raise TuneRefused("which model? Give --service URL, or --base-url URL and --model NAME")
    defaults = CallDefaults(
        model_name=options.model or _name_of_served(bound),
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        enable_thinking=options.enable_thinking,
        timeout_s=options.timeout,
    )
    auxiliary = dict(each.partition("=")[::2] for each in options.auxiliary)
    others = {name: CallDefaults(model_name=served or defaults.model_name) for name, served in auxiliary.items()}
    try:
        report = debug_run(workflow, task, bound, defaults, judge=judge, auxiliary=others)
    except (TuneRefused, ExtraMissing):
        raise
    except Exception:  # noqa: BLE001 - the workflow's, printed in full
        print(visible(traceback.format_exc()), file=sys.stderr)
        _print(DebugReport(calls=bound.calls))
        return 1
    _print(report)
    if report.problem is not None:
        print(f"nothing would be learnt from this run: {report.problem}", file=sys.stderr)
    return 0 if report.problem is None else 1


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model that the workflow calls."""
    group = parser.add_argument_group("the model", "an OpenAI-compatible one, or that of a tuneloop service")
    group.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL"), help="with its /v1 ($OPENAI_BASE_URL)")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"), help="($OPENAI_API_KEY)")
    group.add_argument("--model", help="its name; default: the first that is served")
    group.add_argument(
        "--service", metavar="URL", help="the URL of a tuneloop service: it keeps the run, and does not train on it"
    )
    group.add_argument(
        "--auxiliary", action="append", default=[], metavar="NAME=MODEL", help="an auxiliary model of the same server"
    )
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--enable-thinking", action=argparse.BooleanOptionalAction)
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one call")


def task_at(dataset: DatasetConfig, index: int) -> dict[str, Any]:
    """Raises TuneRefused without a task at the index."""
    if index < 0:
        raise TuneRefused(f"--index must be 0 or more, not {index}")
    tasks = dataset.tasks()
    found = next(islice(tasks, index, None), None)
    if found is None:
        raise TuneRefused(f"{dataset.path}: there are {len(tasks)} tasks, and none has index {index}")
    return found


def _name_of_served(bound: CallsEndpoint) -> str:
    """The first served model. Raises TuneRefused."""
    url = f"{bound.base_url.rstrip('/')}/models"
    try:
        answer = httpx.get(url, headers=header_of_key(bound.api_key), timeout=_MODELS_TIMEOUT_S)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise TuneRefused(f"{url} does not list its models ({error}): name one with --model") from None


def visible(text: str) -> str:
    r"""Escape terminal control characters, which a model may have written.

    >>> visible("fine\x1b[2J\r\nnext\u202e")
    'fine\\x1b[2J\\r\nnext\\u202e'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _print(report: DebugReport) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print(visible("\n".join(report.lines())))
