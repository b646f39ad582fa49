"""tune(): from a workflow, a judge and tasks to a trained model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.config import AlgorithmConfig, JudgeType, TunerModelConfig, WorkflowType
from tuneloop.runner.tuning.config_file import read_tune_file
from tuneloop.runner.tuning.service_settings import merge_settings
from tuneloop.runner.tuning.session import Call, Session, run_to_end
from tuneloop.runner.tuning.signatures import check_judge_function, check_workflow_function
from tuneloop.runner.tuning.summary import TuneResult
from tuneloop.runner.tuning.views.view import View


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
    call = Call(**_with_file(dict(locals())))
    check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    return run_to_end(Session(call).run)


def _with_file(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with what the file says for those that were not given. Raises TuneRefused."""
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
    return given | {"warning": warning}
