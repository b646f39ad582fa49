"""tune(), from a workflow, a judge and tasks to a trained model; and main(), which debugs or trains by a switch."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.config import (
    AlgorithmConfig,
    JudgeType,
    TunerModelConfig,
    WorkflowType,
    check_judge_function,
    check_workflow_function,
    merge_settings,
)
from tuneloop.runner.tuning.config_file import read_tune_file
from tuneloop.runner.tuning.debugging import add_model_options, debug, task_at
from tuneloop.runner.tuning.session import Call, Session, run_to_end
from tuneloop.runner.tuning.views import TuneResult, View


def tune(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType | None = None,
    train_dataset: DatasetConfig | Sequence[Mapping[str, Any]] | None = None,
    eval_dataset: DatasetConfig | Sequence[Mapping[str, Any]] | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, Any] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | Path | None = None,
    service: str | Mapping[str, str] | None = None,
    models: Mapping[str, TunerModelConfig] | None = None,
    resume: bool = False,
    api_key: str = "none",
    checkpoint_root_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    run_timeout: float | None = None,
    retries: int = 1,
    max_failures: float = 0.5,
    max_staleness: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    eval_temperature: float | None = None,
    evaluate_before: bool = True,
    evaluate_after: bool = True,
    service_timeout: float = 300.0,
    start_timeout: float = 1800.0,
    join_timeout: float = 60.0,
    step_timeout: float = 3600.0,
    view: View | None = None,
) -> TuneResult:
    """Train the model that `workflow_func` calls, on the rewards of `judge_func` or of the workflow itself.

    Raises TuneRefused before anything is started if something of this makes no sense, TuneFailed if it was stopped.
    docs/tune_options.md says what each option is.
    """
    # The arguments, with what the file says for those that were not given. Raises TuneRefused.
    given = dict(locals())
    path = given.pop("config_path")
    warning = None
    if path is not None:
        if not isinstance(path, str | PathLike):
            raise TuneRefused(f"config_path must be a path, not {path!r}")
        file = read_tune_file(Path(path))
        configured = {each.name: getattr(file, each.name) for each in fields(file)}
        for name in given.keys() & configured.keys() - {"settings"}:
            given[name] = configured[name] if given[name] is None else given[name]
        given["settings"] = merge_settings(file.settings, given["settings"] or {})
        warning = file.warning
    call = Call(**(given | {"warning": warning}))
    check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    return run_to_end(Session(call).run)


def main(argv: Sequence[str] | None = None, **tuning: Any) -> Any:
    """What a file that tunes ends with: `main(workflow_func=…, …)`, with the arguments of tune().

    `python FILE --backbone=tuneloop`, the default, is `tune(…)`, and returns its result; `--resume` and `--service URL`
    are added to its arguments. `--backbone=debug` runs the workflow once, on a task of `train_dataset`, and exits as
    `tuneloop debug` does.
    """
    parser = argparse.ArgumentParser(description="Tune an agent, or debug it first.")
    parser.add_argument(
        "--backbone", choices=["tuneloop", "debug"], default="tuneloop", help="train, or run the workflow once"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the experiment that was interrupted")
    parser.add_argument("--index", type=int, default=0, help="which task of train_dataset is debugged, from 0")
    add_model_options(parser)
    options = parser.parse_args(argv)
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
        # The options, with what `model` and `auxiliary_models` say of calls where the command line says nothing.
        model = tuning.get("model")
        for name in ("temperature", "top_p", "enable_thinking"):
            if getattr(options, name) is None and model is not None:
                setattr(options, name, getattr(model, name))
        named = {each.partition("=")[0] for each in options.auxiliary}
        options.auxiliary += [name for name in tuning.get("auxiliary_models") or {} if name not in named]
        return debug(tuning["workflow_func"], dict(task), options, judge=tuning.get("judge_func"))
    except (TuneRefused, ExtraMissing) as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command's
        return 2
