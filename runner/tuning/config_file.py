"""Reads configuration files of tune(): ours, and those of Trinity-RFT, which AgentScope's tuner reads.

Options that are arguments of tune() are removed from the file; the rest becomes the settings of the service.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tuneloop.runner.trinity as trinity
from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.tasks.dataset import SELECTORS, DatasetConfig
from tuneloop.runner.trinity import OF_GROUPS
from tuneloop.runner.tuning.config import MONITORS, AlgorithmConfig, TinkerConfig, TunerModelConfig

#: Options without effect in tune(), besides those without effect in services.
_WITHOUT_EFFECT: tuple[str, ...] = ("synchronizer", "explorer.env_vars", "buffer.trainer_input", "buffer.group_by")
_WITHOUT_EFFECT += ("trainer.keep_interval",)

#: Known keys of a task set.
_OF_TASKS = {"path", "subset_name", "split", "name", "rollout_args", "storage_type", "workflow_args"}
_OF_TASKS |= {"default_workflow_type", "default_reward_fn_type", "data_selector", "task_selector"}

_EXPONENT = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFile:
    """A parsed file. `settings` go to the service; `ignored` lists options without effect."""

    path: Path
    model: TunerModelConfig | None = None
    algorithm: AlgorithmConfig | None = None
    train_dataset: DatasetConfig | None = None
    eval_dataset: DatasetConfig | None = None
    auxiliary_models: Mapping[str, TunerModelConfig] = field(default_factory=dict)
    project_name: str | None = None
    experiment_name: str | None = None
    checkpoint_root_dir: str | None = None
    monitor_type: str | None = None
    concurrency: int | None = None
    run_timeout: float | None = None
    eval_temperature: float | None = None
    workflow: str | None = None
    judge: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        return f"{self.path}: without effect here: {', '.join(self.ignored)}" if self.ignored else None


def read_tune_file(path: str | Path) -> TuneFile:
    """Raises TuneRefused, ExtraMissing."""
    path = Path(path).expanduser()
    try:
        import yaml
    except ImportError as error:
        raise ExtraMissing("yaml", f"{path} is YAML") from error
    try:
        found = _loader(yaml)(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise TuneRefused(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise TuneRefused(f"{path}: this is not YAML: {error}") from None
    if not isinstance(found, dict):
        raise TuneRefused(f"{path}: this is not a mapping of options")
    if trinity.is_verls(found):
        raise TuneRefused(f"{path}: {trinity.VERLS_FORMAT}")
    loader = _loader(yaml)("")
    options, unexpanded = trinity.expand(
        found,
        lambda text: loader.construct_object(
            yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
        ),
    )
    for keys, what in unexpanded:
        name = ".".join(map(str, keys))
        tasks = name.startswith("buffer.explorer_input.") or name.startswith("explorer.auxiliary_models.")
        if tasks or not (trinity.is_ignored(name) or name.startswith(tuple(f"{each}." for each in _WITHOUT_EFFECT))):
            raise TuneRefused(f"{path}: {name}: {what}")
    reader = _FileReader(path, options)
    try:
        return reader.read()
    except TuneRefused as error:
        raise TuneRefused(f"{path}: {error}") from None


def _loader(yaml: Any) -> Any:
    """A YAML loader that reads `1e-6` as a number, as YAML 1.2 and Trinity's OmegaConf do."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))  # type: ignore[attr-defined]
    return loader


class _FileReader:
    """Removes options from a file's mapping one by one."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path, self._left = path, options
        self._ignored: list[str] = []
        self._is_trinitys = False

    def read(self) -> TuneFile:
        store = "buffer.trainer_input.experience_buffer."
        inputs = "buffer.explorer_input."
        found, several = self._take(f"{inputs}taskset"), self._take(f"{inputs}tasksets")
        if isinstance(several, list) and several and found is None:
            found = several[0]
            self._ignored += [f"{inputs}tasksets beyond the first"] * (len(several) > 1)
        self._is_trinitys = found is not None or "synchronizer" in self._left
        if found is None and trinity.find(self._left, f"{store}storage_type") == "file":
            raise TuneRefused(f"{store}storage_type: {trinity.A_TRAINING_SET}")
        mode = self._take("mode")
        if mode == "bench":
            raise TuneRefused("mode: tune() trains, and has no 'bench'; eval_dataset is evaluated as it does")
        self._ignored += [f"mode: {mode} (tune() runs the tasks and trains)"] * (mode not in {None, "both"})
        epochs, steps = self._take("buffer.total_epochs"), self._take_first("buffer.total_steps", "trainer.total_steps")
        workflow, judge = (self._take(f"{inputs}default_{each}_type") for each in ("workflow", "reward_fn"))
        train = None
        if found is not None:
            train = self._dataset_of(found, f"{inputs}taskset", total_epochs=epochs or 1, total_steps=steps)
            workflow = found.get("default_workflow_type") or workflow
            judge = found.get("default_reward_fn_type") or judge
            wanted = found.get("rollout_args") or {}  # wins over `model`
            names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_response_tokens"}
            sampled = {names[each]: value for each, value in wanted.items() if each in names and value is not None}
            self._left.setdefault("model", {}).update(sampled)
        for name, called in (("workflow", workflow), ("reward_fn", judge)):
            if called and ":" not in called:  # Trinity's own
                self._ignored.append(f"{inputs}default_{name}_type: {called}")
        evaluation, eval_temperature = self._evaluation(f"{inputs}eval_tasksets")
        rest = self._take("buffer.explorer_input")
        if isinstance(rest, dict):
            self._ignored += [f"{inputs}{each}" for each in rest]
        monitor = self._take("monitor.monitor_type")
        if monitor is not None and monitor not in MONITORS:
            self._ignored.append(f"monitor.monitor_type: {monitor} (curves go to {', '.join(MONITORS)})")
            monitor = None
        runners = self._take("explorer.runner_per_model")
        models = self._auxiliary_models()
        run_timeout = self._take("explorer.max_timeout")
        if (interval := self._take("synchronizer.sync_interval")) not in {None, 1}:
            self._ignored.append(f"synchronizer.sync_interval: {interval} (there is a version after each step)")
        algorithm, model = self._algorithm(), self._model()
        for name in [*_WITHOUT_EFFECT, *filter(trinity.is_ignored, _names_in(self._left))]:
            if self._take(name) is not None:
                self._ignored.append(name)
        return TuneFile(
            path=self._path,
            model=model,
            algorithm=algorithm,
            train_dataset=train,
            eval_dataset=evaluation,
            auxiliary_models=models,
            project_name=self._take("project"),
            experiment_name=self._take("name"),
            checkpoint_root_dir=self._take("checkpoint_root_dir"),
            monitor_type=monitor,
            concurrency=(None if runners is None else int(runners)),
            run_timeout=run_timeout,
            eval_temperature=eval_temperature,
            workflow=workflow,
            judge=judge,
            settings=_without_empty(self._left),
            ignored=tuple(self._ignored),
        )

    def _evaluation(self, name: str) -> tuple[DatasetConfig | None, float | None]:
        found = self._take(name)
        if not found:
            return None, None
        if not isinstance(found, list) or len(found) > 1:
            self._ignored.append(f"{name} beyond the first")
        first = found[0] if isinstance(found, list) else found
        return self._dataset_of(first, name), (first.get("rollout_args") or {}).get("temperature")

    def _auxiliary_models(self) -> dict[str, TunerModelConfig]:
        models = {}
        for number, each in enumerate(self._take("explorer.auxiliary_models") or []):
            named = each.get("name") or f"auxiliary_{number}"
            models[named] = TunerModelConfig(
                str(each["model_path"]),
                max_model_len=each.get("max_model_len"),
                tensor_parallel_size=each.get("tensor_parallel_size", 1),
                inference_engine_num=each.get("engine_num", 1),
                tool_call_parser=each.get("tool_call_parser"),
                reasoning_parser=each.get("reasoning_parser"),
            )
        return models

    def _model(self) -> TunerModelConfig | None:
        path = self._take("model.model_path")
        if path is None:
            return None
        rollout = "explorer.rollout_model."
        given = {
            "max_model_len": self._take("model.max_model_len"),
            "temperature": self._take("model.temperature"),
            "top_p": self._take("model.top_p"),
            "max_tokens": self._take("model.max_response_tokens"),
            "enable_thinking": self._take_first(f"{rollout}enable_thinking", "model.enable_thinking"),
            "tensor_parallel_size": self._take(f"{rollout}tensor_parallel_size"),
            "inference_engine_num": self._take(f"{rollout}engine_num"),
            "reasoning_parser": self._take(f"{rollout}reasoning_parser"),
        }
        self._take(f"{rollout}enable_auto_tool_choice")
        # Without a parser in the file there is none, as in Trinity; AgentScope's tuner has a default.
        parser = self._take(f"{rollout}tool_call_parser")
        known = {name: value for name, value in given.items() if value is not None}
        rank = trinity.number(trinity.find(self._left, "model.lora.rank"))
        adapter = TinkerConfig(int(rank)) if rank else None
        return TunerModelConfig(str(path), tool_call_parser=parser, tinker_config=adapter, **known)

    def _algorithm(self) -> AlgorithmConfig | None:
        steps = {
            "group_size": self._take_first("algorithm.repeat_times", "buffer.group_size"),
            "batch_size": self._take("buffer.batch_size"),
            "eval_interval_steps": self._take("explorer.eval_interval"),
        }
        if kept := self._take("trainer.save_interval"):
            steps["save_interval_steps"] = kept if self._is_trinitys else None
            self._ignored += ["trainer.save_interval"] * (not self._is_trinitys and kept != 1)
        experiences = self._take("buffer.train_batch_size")
        # The remaining options go to the service, including the method's own.
        ignored, problems = trinity.translate(self._left, tasks=self._is_trinitys)
        if problems:
            raise TuneRefused("; ".join(f"{name}: {what}" for name, what in problems))
        self._ignored += ignored
        given = steps | {
            "algorithm_type": self._take("algorithm.algorithm_type"),
            "learning_rate": self._take("algorithm.optimizer.lr"),
        }
        known = {name: value for name, value in given.items() if value is not None}
        if not known and experiences is None:
            return None
        if known.get("algorithm_type", "ppo") not in OF_GROUPS:
            known.setdefault("group_size", 1)
            known.setdefault("algorithm_type", "ppo")
        group_size = known.get("group_size", AlgorithmConfig().group_size)
        if experiences is not None and "batch_size" not in known:
            known["batch_size"] = max(1, experiences // group_size)
        elif experiences is not None and experiences != known["batch_size"] * group_size:
            self._ignored.append("buffer.train_batch_size (a step is batch_size tasks x group_size runs)")
        return AlgorithmConfig(**known)

    def _dataset_of(self, found: Any, name: str, **how: Any) -> DatasetConfig:
        if not isinstance(found, dict) or not found.get("path"):
            raise TuneRefused(f"{name}: path is missing")
        selector = found.get("data_selector") or found.get("task_selector")
        self._ignored += [f"{name}.{each}" for each in found if each not in _OF_TASKS]
        used = {"temperature", "top_p", "max_tokens"}
        self._ignored += [f"{name}.rollout_args.{each}" for each in found.get("rollout_args") or () if each not in used]
        kind = (selector or {}).get("selector_type", "sequential")
        if kind not in SELECTORS:
            self._ignored.append(f"{name}.task_selector: {kind} (tasks are run in their order)")
            selector = None
        path = Path(str(found["path"]))
        beside = self._path.parent / path
        return DatasetConfig(
            str(beside if not path.is_absolute() and not path.exists() and beside.exists() else path),
            name=found.get("subset_name"),
            split=found.get("split") or "train",
            workflow_args=found.get("workflow_args"),
            task_selector=selector,
            **how,
        )

    def _take_first(self, *names: str) -> Any:
        found = [self._take(name) for name in names]
        return next((each for each in found if each is not None), None)

    def _take(self, name: str) -> Any:
        """Remove an option and return its value, or None."""
        return trinity.pop_option(self._left, name)


def _names_in(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in list(options.items()):
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names_in(value, f"{prefix}{name}.")


def _without_empty(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _without_empty(each) if isinstance(each, Mapping) else each for name, each in settings.items()}
    return {name: each for name, each in found.items() if each != {} and each is not None}
