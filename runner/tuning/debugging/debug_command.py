"""The command `tuneloop debug`: a workflow run once, before anything is trained."""

import argparse
import json
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import httpx

from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.key_header import header_of_key
from tuneloop.runner.models.bound_model import CallDefaults, CallsEndpoint, ModelEndpoint
from tuneloop.runner.models.run import Run
from tuneloop.runner.rewards.visible_text import visible
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.debugging.one_run import DebugReport, debug_run, load_function

_PROG = "tuneloop debug"

#: How long a service may take to say which model it serves.
_MODELS_TIMEOUT_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 1 if the workflow failed or nothing could be learnt, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        workflow = load_function(options.workflow)
        judge = None if options.judge is None else load_function(options.judge, options.workflow.rpartition(":")[0])
        return debug(workflow, _tasks(options, parser)[0], options, judge=judge)
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
    """Run a workflow on a task with the model that the options name, and print the report; the exit code."""
    bound, name = _model(options)
    defaults = _defaults(options, name)
    auxiliary = dict(each.partition("=")[::2] for each in options.auxiliary)
    others = {name: CallDefaults(model_name=served or defaults.model_name) for name, served in auxiliary.items()}
    try:
        report = debug_run(workflow, task, bound, defaults, judge=judge, auxiliary=others)
    except (TuneRefused, ExtraMissing):
        raise
    except Exception:  # noqa: BLE001 - it is the workflow's own, and shown whole
        traceback.print_exc()
        _print(DebugReport(calls=bound.calls))
        return 1
    _print(report)
    if report.problem is not None:
        print(f"nothing would be learnt from this run: {report.problem}", file=sys.stderr)
    return 0 if report.problem is None else 1


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which model the workflow calls."""
    group = parser.add_argument_group("the model", "an OpenAI-compatible one, or that of a service of ours")
    group.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL"), help="with its /v1 ($OPENAI_BASE_URL)")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"), help="($OPENAI_API_KEY)")
    group.add_argument("--model", help="its name; default: the only one, or the first, that is served there")
    group.add_argument(
        "--service", metavar="URL", help="the URL of a service of ours: the run is kept there, and not trained on"
    )
    group.add_argument(
        "--auxiliary", action="append", default=[], metavar="NAME=MODEL", help="an auxiliary model that is served there"
    )
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--enable-thinking", action=argparse.BooleanOptionalAction)
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one call")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("workflow", metavar="FILE:FUNCTION")
    parser.add_argument("--judge", metavar="FUNCTION", help="of the same file, or FILE:FUNCTION")
    parser.add_argument("--task", metavar="JSON", help="an object; @FILE reads it from a file")
    parser.add_argument("--dataset", metavar="PATH", help="instead of --task: the task comes from there")
    parser.add_argument("--split", default="train")
    parser.add_argument("--index", type=int, default=0, help="which task of the dataset, from 0")
    add_model_options(parser)
    return parser


def _tasks(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    if (options.task is None) == (options.dataset is None):
        parser.error("give a task with --task, or a dataset with --dataset")
    if options.dataset is not None:
        return [task_at(DatasetConfig(options.dataset, split=options.split), options.index)]
    text = options.task
    if text.startswith("@"):
        with open(text[1:], encoding="utf-8") as file:
            text = file.read()
    try:
        task = json.loads(text)
    except ValueError as error:
        raise TuneRefused(f"--task is not JSON: {error}") from None
    if not isinstance(task, dict):
        raise TuneRefused("--task must be a JSON object")
    return [task]


def task_at(dataset: DatasetConfig, index: int) -> dict[str, Any]:
    """A task of a dataset. Raises TuneRefused."""
    if index < 0:
        raise TuneRefused(f"--index must be 0 or more, not {index}")
    tasks = dataset.tasks()
    found = next(islice(tasks, index, None), None)
    if found is None:
        raise TuneRefused(f"{dataset.path}: there are {len(tasks)} tasks, and none has index {index}")
    return found


def _model(options: argparse.Namespace) -> tuple[CallsEndpoint, str]:
    """What the calls are bound to, and the model's name there."""
    if options.service is not None:
        run_id = uuid.uuid4().hex
        run = Run(service=options.service, task_id="debug", run_id=run_id, train=False, api_key=options.api_key)
        return run, options.model or _name_of_served(run)
    if options.base_url is None:
        raise TuneRefused("which model? Give --service URL, or --base-url URL and --model NAME")
    bound = ModelEndpoint(base_url=options.base_url, api_key=options.api_key)
    return bound, options.model or _name_of_served(bound)


def _name_of_served(bound: CallsEndpoint) -> str:
    """The first model that is served. Raises TuneRefused."""
    url = f"{bound.base_url.rstrip('/')}/models"
    try:
        answer = httpx.get(url, headers=header_of_key(bound.api_key), timeout=_MODELS_TIMEOUT_S)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise TuneRefused(f"{url} does not say which models there are ({error}): name one with --model") from None


def _defaults(options: argparse.Namespace, name: str) -> CallDefaults:
    return CallDefaults(
        model_name=name,
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        enable_thinking=options.enable_thinking,
        timeout_s=options.timeout,
    )


def _print(report: DebugReport) -> None:
    print(visible("\n".join(report.lines()), sys.stdout.encoding))
