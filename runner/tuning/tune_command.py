"""Runs the command tuneloop tune: runs, rewards and trains on the tasks of a file, as `trinity run` does."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import ExtraMissing, TuneError, TuneRefused
from tuneloop.runner.tuning.config_file import TuneFile, read_tune_file
from tuneloop.runner.tuning.debugging import load_function
from tuneloop.runner.tuning.tune import tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0, 1 if training stopped, 2 for invalid input, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="tuneloop tune", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="a YAML file with tasks, of Trinity-RFT or tuneloop")
    parser.add_argument("--workflow", metavar="MODULE:FUNCTION", help="the workflow; or FILE.py:FUNCTION")
    parser.add_argument("--judge", metavar="MODULE:FUNCTION", help="the judge, if the workflow returns no reward")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted experiment")
    parser.add_argument("--service", metavar="URL", help="use a running service with its settings")
    options = parser.parse_args(argv)
    try:
        file = read_tune_file(options.file)
        workflow, judge = _functions(file, options.workflow, options.judge)
        tune(
            workflow_func=workflow,
            judge_func=judge,
            config_path=options.file,
            resume=options.resume,
            service=options.service,
        )
    except (TuneError, ExtraMissing) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, TuneRefused | ExtraMissing) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _functions(
    file: TuneFile, workflow: str | None, judge: str | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The workflow and the judge. Raises TuneRefused for names of Trinity's own workflows."""
    if file.train_dataset is None:
        raise TuneRefused(f"{file.path}: buffer.explorer_input.taskset is missing: there is no task to run")
    named = workflow or file.workflow
    if named is None or ":" not in named:
        why = "it names no workflow" if named is None else f"its workflow {named} is Trinity's own"
        raise TuneRefused(
            f"{file.path}: {why}. Write one (docs/tune.md), and name it: tuneloop tune {file.path} --workflow"
            " module:function"
        )
    judge = judge or (file.judge if file.judge and ":" in file.judge else None)
    if judge is None and file.judge:
        print(f"{file.path}: its reward {file.judge} is Trinity's own: the workflow, or --judge, gives the reward")
    return load_function(named), None if judge is None else load_function(judge)
