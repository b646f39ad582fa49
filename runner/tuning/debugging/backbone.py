"""main(): one file that debugs its workflow or trains with it, by a switch on its command line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.tuning.debugging.debug_command import add_model_options, debug, task_at
from tuneloop.runner.tuning.tune import tune


def main(argv: Sequence[str] | None = None, **tuning: Any) -> Any:
    """What a file that tunes ends with: `main(workflow_func=…, …)`, with the arguments of tune().

    `python FILE --backbone=tuneloop`, the default, is `tune(…)`, and returns its result; `--resume` and `--service URL`
    are added to its arguments. `--backbone=debug` runs the workflow once, on a task of `train_dataset`, and exits as
    `tuneloop debug` does.
    """
    options = _parser().parse_args(argv)
    if options.backbone == "debug":
        sys.exit(_debug(options, tuning))
    if options.resume:
        tuning["resume"] = True
    if options.service is not None:
        tuning["service"] = options.service
    return tune(**tuning)


def _debug(options: argparse.Namespace, tuning: dict[str, Any]) -> int:
    try:
        dataset = tuning.get("train_dataset")
        if dataset is None:
            raise TuneRefused("train_dataset is missing: there is no task to debug with")
        task = task_at(dataset, options.index) if hasattr(dataset, "tasks") else list(dataset)[options.index]
        return debug(
            tuning["workflow_func"], dict(task), _with_the_models(options, tuning), judge=tuning.get("judge_func")
        )
    except (TuneRefused, ExtraMissing) as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command's
        return 2


def _with_the_models(options: argparse.Namespace, tuning: dict[str, Any]) -> argparse.Namespace:
    """The options, with what `model` and `auxiliary_models` say of calls where the command line says nothing."""
    model = tuning.get("model")
    for name in ("temperature", "top_p", "enable_thinking"):
        if getattr(options, name) is None and model is not None:
            setattr(options, name, getattr(model, name))
    named = {each.partition("=")[0] for each in options.auxiliary}
    options.auxiliary += [name for name in tuning.get("auxiliary_models") or {} if name not in named]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Tune an agent, or debug it first.")
    parser.add_argument(
        "--backbone", choices=["tuneloop", "debug"], default="tuneloop", help="train, or run the workflow once"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the experiment that was interrupted")
    parser.add_argument("--index", type=int, default=0, help="which task of train_dataset is debugged, from 0")
    add_model_options(parser)
    return parser
