"""One call of tune(), from what it was told to its result."""

import asyncio
import math
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from tuneloop.runner.collection.run_records import loop_runs
from tuneloop.runner.errors import TuneRefused
from tuneloop.runner.tuning.attempts import Attempts, Binding, FailureLog, Limits
from tuneloop.runner.tuning.config import (
    AlgorithmConfig,
    JudgeType,
    ServicePlace,
    TunerModelConfig,
    WorkflowType,
    require_monitor,
    require_number,
    require_type,
    require_whole,
    service_settings,
)
from tuneloop.runner.tuning.experiment import ExperimentFolder, Journal, JournalState, TaskPlan, require_tasks
from tuneloop.runner.tuning.services import (
    MAIN,
    ModelFactory,
    ServiceOpener,
    ServiceOptions,
    StepTimeouts,
    call_defaults,
    find_command,
)
from tuneloop.runner.tuning.steps import Pace, StepLoop, evaluation_report, step_report
from tuneloop.runner.tuning.views import TuneResult, View, open_view

#: Runs at once, and seconds that a run may take, where nobody says otherwise.
CONCURRENCY, RUN_TIMEOUT_S = 64, 600.0

#: Of which kind arguments are, and how to say it.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "algorithm": (AlgorithmConfig, "an AlgorithmConfig"),
    "model": (TunerModelConfig, "a TunerModelConfig"),
    "models": (Mapping, "a dict of names and TunerModelConfigs"),
    "auxiliary_models": (Mapping, "a dict of names and models"),
    "project_name": (str, "a text"),
    "experiment_name": (str, "a text"),
    "service": ((str, Mapping), "a URL, or a dict of models' names and URLs"),
    "settings": (Mapping, "a dict"),
    "checkpoint_root_dir": ((str, PathLike), "a path"),
    "seed": (int, "a whole number"),
}
_FLAGS = ("resume", "shuffle", "evaluate_before", "evaluate_after")
_VIEW = ("say", "run_ended", "step", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What tune() was called with."""

    workflow_func: WorkflowType
    judge_func: JudgeType | None
    train_dataset: Any
    eval_dataset: Any
    model: TunerModelConfig | None
    auxiliary_models: Mapping[str, Any] | None
    algorithm: AlgorithmConfig | None
    project_name: str | None
    experiment_name: str | None
    monitor_type: str | None
    service: str | Mapping[str, str] | None
    models: Mapping[str, TunerModelConfig] | None
    resume: bool
    api_key: str
    checkpoint_root_dir: str | Path | None
    settings: Mapping[str, Any] | None
    concurrency: int | None
    run_timeout: float | None
    retries: int
    max_failures: float
    max_staleness: int
    shuffle: bool
    seed: int
    eval_temperature: float | None
    evaluate_before: bool
    evaluate_after: bool
    service_timeout: float
    start_timeout: float
    join_timeout: float
    step_timeout: float
    view: View | None
    warning: str | None = None

    def __post_init__(self) -> None:
        """Raise TuneRefused for a value that makes no sense."""
        self._check_types()
        for name in ("concurrency", "retries", "max_staleness"):
            if getattr(self, name) is not None:
                require_whole(self, name, least=int(name == "concurrency"))
        for name in ("run_timeout", "service_timeout", "start_timeout", "join_timeout", "step_timeout"):
            if getattr(self, name) is not None:
                require_number(self, name, 0, math.inf)
                if getattr(self, name) == 0:
                    raise TuneRefused(f"{name} must be above 0")
        require_number(self, "max_failures", 0, 1)
        if self.eval_temperature is not None:
            require_number(self, "eval_temperature", 0, 2)
        require_monitor(self.monitor_type)
        for url in self.service.values() if isinstance(self.service, Mapping) else [self.service] * bool(self.service):
            if not re.match(r"https?://[^/]", str(url)):
                raise TuneRefused(f"service: {url!r} is no URL such as http://localhost:8010")
        if self.model is not None and self.models:
            raise TuneRefused("model= and models= are both given: models= names all models that are trained")

    def _check_types(self) -> None:
        for name, (kinds, words) in _KINDS.items():
            require_type(self, name, kinds, words)
        for name, config in (self.models or {}).items():
            if not isinstance(config, TunerModelConfig):
                raise TuneRefused(f"models: {name!r} must be a TunerModelConfig, not {config!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TuneRefused(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.api_key, str) or not self.api_key.isascii() or not self.api_key.isprintable():
            raise TuneRefused("api_key must be a text of visible ASCII characters")
        if self.view is not None and not all(callable(getattr(self.view, name, None)) for name in _VIEW):
            raise TuneRefused(f"view must have the methods {', '.join(_VIEW)}, as {self.view!r} has not")


@dataclass(slots=True)
class Session:
    """One call of tune(), from its folder to its result."""

    call: Call

    @property
    def _run_timeout_s(self) -> float:
        return self.call.run_timeout or RUN_TIMEOUT_S

    async def run(self) -> TuneResult:
        """Make all steps that are left to make."""
        call = self.call
        algorithm = call.algorithm or AlgorithmConfig()
        tasks, evaluation = (_tasks_of(call, name) for name in ("train_dataset", "eval_dataset"))
        require_tasks(tasks, "train_dataset")
        if evaluation:
            require_tasks(evaluation, "eval_dataset")
        if not self._configs() and not call.service:
            raise TuneRefused("tune() needs a model to train: model=TunerModelConfig(…), or service='http://…'")
        for name, config in self._configs().items():
            if name not in self._urls():
                find_command()
                service_settings(config, algorithm, ServicePlace(), monitor_type=call.monitor_type)
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
            shuffle=call.shuffle,
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
            if await _begin(journal, plan):
                view.say("all steps of it are made")
                return _result_of(journal.state, folder, FailureLog(view.say), started=not call.service)
            # Start or join the services, and make what binds the workflow's models to its runs.
            call, configs = self.call, self._configs()
            options = ServiceOptions(
                api_key=call.api_key,
                timeout_s=call.service_timeout,
                start_timeout_s=call.start_timeout,
                join_timeout_s=call.join_timeout,
                over=call.settings or {},
                monitor_type=call.monitor_type,
            )
            opener = ServiceOpener(folder, options, stack, say=view.say)
            services = await opener.open_trained(configs, self._urls(), call.algorithm)
            others = await opener.open_auxiliary(call.auxiliary_models or {}, call.workflow_func)
            defaults = {
                name: call_defaults(await client.model_name(), configs.get(name), timeout_s=self._run_timeout_s)
                for name, client in services.items()
            }
            models = ModelFactory(call.workflow_func, defaults, eval_temperature=call.eval_temperature)
            await stack.enter_async_context(models)
            binding = Binding(trained=services, model_for=models.model_for, others=others)
            return await self._train(plan, folder, journal, binding, view)

    async def _train(
        self,
        plan: TaskPlan,
        folder: ExperimentFolder,
        journal: Journal,
        binding: Binding,
        view: View,
    ) -> TuneResult:
        call, failures = self.call, FailureLog(view.say)
        interval = call.algorithm.eval_interval_steps if call.algorithm else 100
        attempts = Attempts(
            binding,
            call.workflow_func,
            call.judge_func,
            limits=Limits(
                timeout_s=self._run_timeout_s, retries=call.retries, concurrency=call.concurrency or CONCURRENCY
            ),
            failures=failures,
            life=journal.state.lives,
        )
        pace = Pace(
            max_staleness=call.max_staleness,
            max_failures=call.max_failures,
            evaluation_interval=interval,
            evaluate_before=call.evaluate_before,
            evaluate_after=call.evaluate_after,
            patience=StepTimeouts(step_s=call.step_timeout, trainer_s=call.service_timeout),
        )
        training = StepLoop(plan, pace, attempts=attempts, services=binding.trained, journal=journal, view=view)
        try:
            await training.run()
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        except asyncio.CancelledError:
            view.say(f"interrupted: the same call with resume=True goes on in {folder.path}")
            raise
        await journal.append({"event": "end"})
        result = _result_of(journal.state, folder, failures, started=not call.service)
        view.say(f"reward before {result.before or 'unknown'}; after {result.after or 'unknown'}")
        if result.failures:
            view.say("failed: " + ", ".join(f"{count} x {kind}" for kind, count in result.failures.items()))
        view.say(f"curves: tensorboard --logdir {result.tensorboard}")
        if result.checkpoints:
            view.say(f"checkpoints: {result.checkpoints}/global_step_*")
        return result

    def _configs(self) -> dict[str, TunerModelConfig]:
        return dict(self.call.models or ({MAIN: self.call.model} if self.call.model else {}))

    def _urls(self) -> dict[str, str]:
        service = self.call.service
        names = list(self.call.models or [MAIN])
        return {names[0]: service} if isinstance(service, str) else dict(service or {})


async def _begin(journal: Journal, plan: TaskPlan) -> bool:
    """Begin, or go on; True if there is nothing left to do. Raises TuneRefused."""
    header = journal.state.header
    fingerprint = plan.fingerprint()
    if header is not None and header["fingerprint"] != fingerprint:
        raise TuneRefused(
            f"{journal.path} was begun with other tasks, batch_size, group_size, shuffle or seed: resume with those, "
            "or start anew without resume=True"
        )
    if journal.state.ended and all(
        journal.state.is_committed(step, len(plan.positions(step))) for step in range(plan.total_steps)
    ):
        return True
    await journal.append({"event": "begin", "fingerprint": fingerprint, "name": plan.name, "steps": plan.total_steps})
    return False


def _tasks_of(call: Call, name: str) -> Sequence[Mapping[str, Any]]:
    dataset = getattr(call, name)
    if dataset is None:
        return ()
    if hasattr(dataset, "tasks"):
        return list(dataset.tasks())
    if isinstance(dataset, str | PathLike | Mapping) or not isinstance(dataset, Iterable):
        raise TuneRefused(f"{name} must be a list of tasks, or a DatasetConfig, which reads a file, not {dataset!r}")
    return list(dataset)


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
    """Run it in an event loop of its own; in a thread where one runs already, as in a notebook."""

    async def run() -> TuneResult:
        return await main()

    return _in_thread(run) if loop_runs() else asyncio.run(run())


def _in_thread(main: Callable[[], Coroutine[Any, Any, TuneResult]]) -> TuneResult:
    """What interrupts the caller, as a notebook's stop button does, ends it too."""
    under_way: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    future: Future[TuneResult] = Future()

    async def run() -> TuneResult:
        under_way.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await main()

    def work() -> None:
        try:
            future.set_result(asyncio.run(run()))
        except BaseException as error:  # noqa: BLE001 - it is raised where the thread is waited for
            future.set_exception(error)

    thread = threading.Thread(target=work, name="tuneloop-tune", daemon=True)
    try:
        thread.start()  # It may be at work before this returns.
        return future.result()
    except KeyboardInterrupt:
        for loop, task in under_way:
            if task is not None and not future.done():
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
