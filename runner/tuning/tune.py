"""Trains a model from a workflow, a judge and tasks (`tune`); `main` adds a command line that debugs or trains."""

import argparse
import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from tuneloop.runner.collection.run_records import running_loop
from tuneloop.runner.errors import ExtraMissing, TuneError, TuneRefused, say_without_traceback
from tuneloop.runner.models.bound_model import make_model, wanted_client
from tuneloop.runner.models.run import Run
from tuneloop.runner.models.transport import close_connections
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.attempts import Attempts, FailureLog
from tuneloop.runner.tuning.config import (
    RUN_TIMEOUT_S,
    AlgorithmConfig,
    Call,
    JudgeType,
    ServicePlace,
    TunerModelConfig,
    WorkflowType,
    check_judge_function,
    check_workflow_function,
    merge_settings,
    service_settings,
)
from tuneloop.runner.tuning.config_file import read_tune_file
from tuneloop.runner.tuning.debugging import add_model_options, debug, task_at
from tuneloop.runner.tuning.experiment import ExperimentFolder, Journal, JournalState, TaskPlan, tasks_of
from tuneloop.runner.tuning.services import ServiceClient, ServiceOpener, ServiceOptions, call_defaults, find_command
from tuneloop.runner.tuning.steps import StepLoop, evaluation_report, step_report
from tuneloop.runner.tuning.views import TuneResult, View, open_view


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
    policy: str | Mapping[str, str] | None = None,
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
    """Train the model that `workflow_func` calls, by its rewards or those of `judge_func`. Options: docs/settings.md.

    Raises TuneRefused before anything starts if an argument is invalid, TuneFailed if training stopped.
    """
    given = dict(locals())
    try:
        return _call_of(given)
    except TuneError as error:
        say_without_traceback(error)
        raise


def _call_of(given: dict[str, Any]) -> TuneResult:
    """Run the call; the configuration file supplies the arguments that are not given."""
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
    check_workflow_function(call.workflow_func)
    if call.judge_func is not None:
        check_judge_function(call.judge_func)
    return run_to_end(lambda: _tune(call))


async def _tune(call: Call) -> TuneResult:
    algorithm = call.algorithm or AlgorithmConfig()
    tasks, evaluation = tasks_of(call.train_dataset, "train_dataset"), tasks_of(call.eval_dataset, "eval_dataset")
    if not tasks:
        raise TuneRefused("train_dataset is empty: there is nothing to run")
    configs, urls, service = call.trained_models, call.urls, call.service
    if not configs and not service:
        raise TuneRefused("tune() needs a model to train: model=TunerModelConfig(…), or service='http://…'")
    for config in [each for name, each in configs.items() if name not in urls]:
        find_command()
        service_settings(config, algorithm, ServicePlace(), monitor_type=call.monitor_type, over=call.settings)
    folder = ExperimentFolder.open(
        Path(call.checkpoint_root_dir or "checkpoints"),
        call.project_name or "AgentScope",
        call.experiment_name or "Experiment",
        resume=call.resume,
    )
    plan = TaskPlan(
        name=folder.name,
        tasks=tasks,
        evaluation=evaluation,
        batch_size=algorithm.batch_size,
        group_size=algorithm.group_size,
        epochs=getattr(call.train_dataset, "total_epochs", 1) or 1,
        steps=getattr(call.train_dataset, "total_steps", None),
        shuffle=call.shuffle or getattr(call.train_dataset, "selector_type", None) == "shuffle",
        independent=getattr(call.train_dataset, "selector_type", None) == "random",
        seed=call.seed,
    )
    async with AsyncExitStack() as stack:
        journal = Journal(folder.journal)
        stack.callback(journal.close)
        view = stack.enter_context(open_view(call.view, folder.tensorboard))
        tasks_of_step = len(plan.positions(0))
        view.say(f"{folder.path}: {plan.total_steps} steps of {tasks_of_step} tasks x {plan.group_size} runs")
        if call.warning:
            view.say(call.warning)
        state, fingerprint, failures = journal.state, plan.fingerprint(), FailureLog(view.say)
        if state.header is not None and state.header["fingerprint"] != fingerprint:
            raise TuneRefused(
                f"{journal.path} has other tasks, batch_size, group_size, shuffle or seed: resume with "
                "those, or start again without resume=True"
            )
        if state.ended and state.first_step(plan) == plan.total_steps:
            view.say("all steps of this experiment are complete")
            return _result_of(state, folder, failures, started=not service)
        begin = {"event": "begin", "fingerprint": fingerprint, "name": plan.name, "steps": plan.total_steps}
        await journal.append(begin)
        options = ServiceOptions(
            api_key=call.api_key,
            timeout_s=call.service_timeout,
            start_timeout_s=call.start_timeout,
            join_timeout_s=call.join_timeout,
            over=call.settings or {},
            monitor_type=call.monitor_type,
        )
        opener = ServiceOpener(folder, options, stack, say=view.say)
        services = await opener.open_trained(configs, urls, call.algorithm, call.policies)
        others = await opener.open_auxiliary(call.auxiliary_models or {}, call.workflow_func)
        stack.push_async_callback(close_connections)
        model_for = await _model_maker(call, services, configs)
        attempts = Attempts(call, services, model_for, others, failures=failures, life=state.lives)
        loop = StepLoop(plan, call, attempts=attempts, services=services, journal=journal, view=view)
        try:
            await loop.run()
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        except asyncio.CancelledError:
            view.say(f"interrupted: the same call with resume=True continues in {folder.path}")
            raise
        await journal.append({"event": "end"})
        result = _result_of(state, folder, failures, started=not service)
        view.say(f"reward before {result.before or 'unknown'}; after {result.after or 'unknown'}")
        if result.failures:
            view.say("failed: " + ", ".join(f"{count} x {kind}" for kind, count in result.failures.items()))
        curves = f"tensorboard --logdir {result.tensorboard}" if result.tensorboard.exists() else "none in this folder"
        view.say(f"curves: {curves}")
        if result.checkpoints:
            view.say(f"checkpoints: {result.checkpoints}/global_step_*")
        return result


async def _model_maker(
    call: Call, services: Mapping[str, ServiceClient], configs: Mapping[str, TunerModelConfig]
) -> Callable[[str, Run], Any]:
    timeout_s = call.run_timeout or RUN_TIMEOUT_S
    defaults = {
        name: call_defaults(await client.model_name(), configs.get(name), timeout_s=timeout_s)
        for name, client in services.items()
    }
    kind, sync = wanted_client(call.workflow_func)

    def model_for(name: str, run: Run) -> Any:
        wanted = defaults[name]
        if not run.train and call.eval_temperature is not None:
            wanted = replace(wanted, temperature=call.eval_temperature)
        return make_model(run, wanted, client=kind, sync=sync)

    return model_for


def _result_of(state: JournalState, folder: ExperimentFolder, failures: FailureLog, *, started: bool) -> TuneResult:
    evaluations = [evaluation_report(line) for line in state.evaluations]
    steps = [step_report(state, step) for step in sorted(state.steps)]
    rewards = [each.reward for each in evaluations] or [each.reward for each in steps]
    return TuneResult(
        folder=folder.path,
        tensorboard=folder.tensorboard,
        checkpoints=folder.path if started else None,
        steps=steps[-1].step if steps else 0,
        version=steps[-1].version if steps else 0,
        before=rewards[0] if rewards else None,
        after=rewards[-1] if rewards else None,
        evaluations=evaluations,
        history=steps,
        failures=dict(failures.counts),
    )


def run_to_end(main: Callable[[], Awaitable[TuneResult]]) -> TuneResult:
    """Run it in a new event loop: in a thread if a loop runs already, as in a notebook."""
    under_way: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    future: Future[TuneResult] = Future()

    async def run() -> TuneResult:
        under_way.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await main()

    def work() -> None:
        try:
            future.set_result(asyncio.run(run()))
        except BaseException as error:  # noqa: BLE001 - `future.result()` raises it
            future.set_exception(error)

    if not running_loop():
        return asyncio.run(run())
    thread = threading.Thread(target=work, name="tuneloop-tune", daemon=True)
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:
        for loop, task in under_way:
            if task is not None and not future.done():
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise


def main(argv: Sequence[str] | None = None, **tuning: Any) -> Any:
    """Parse the command line of a tuning script, `main(workflow_func=…, …)` with the arguments of tune().

    `--backbone=tuneloop`, the default, returns the result of tune(); `--resume` and `--service URL` override arguments.
    `--backbone=debug` runs the workflow once on a task of `train_dataset`, and exits as `tuneloop debug` does.
    """
    parser = argparse.ArgumentParser(description="Tune an agent, or debug it first.")
    parser.add_argument(
        "--backbone",
        choices=["tuneloop", "trinity", "debug"],  # Trinity's word, in commands written for AgentScope's tuner
        default="tuneloop",
        help="train (trinity: the same), or run the workflow once",
    )
    parser.add_argument("--resume", action="store_true", help="continue the interrupted experiment")
    parser.add_argument("--index", type=int, default=0, help="index of the task of train_dataset to debug, from 0")
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
        # The command line wins over `model` and `auxiliary_models`.
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
