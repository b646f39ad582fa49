"""Configuration files of tune(): ours, and those written for Trinity-RFT, which AgentScope's tuner reads.

What tune() has arguments for is taken out of the file: the tasks, the model, the algorithm, the experiment's name. The
rest is handed on to the service as its settings, which knows Trinity's names too.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import ExtraMissing, TuneRefused
from tuneloop.runner.tasks.dataset import DatasetConfig
from tuneloop.runner.tuning.config import MONITORS, OF_GROUPS, AlgorithmConfig, TinkerConfig, TunerModelConfig

#: Options of Trinity's that mean nothing here whatever they say: our services do by themselves what they are about.
_WITHOUT_EFFECT = (
    "mode",
    "synchronizer",
    "ray_namespace",
    "stages",
    "log",
    "data_processor",
    "buffer.explorer_input.taskset.workflow_args",
    "buffer.explorer_input.taskset.default_workflow_type",
    "buffer.explorer_input.taskset.default_reward_fn_type",
    "buffer.explorer_input.taskset.format",
    "buffer.explorer_input.default_workflow_type",
    "buffer.explorer_input.default_reward_fn_type",
    "buffer.trainer_input",
    "buffer.pad_token_id",
    "explorer.max_repeat_times_per_runner",
    "explorer.env_vars",
    "trainer.save_interval",
    "trainer.trainer_type",
    "trainer.trainer_config",
)

_EXPONENT = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
_VARIABLE = re.compile(r"\$\{oc\.env:(?P<name>\w+)(?:,(?P<default>[^}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFile:
    """What a file says. `settings` are for the service; `ignored` names what has no effect."""

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
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """One sentence about all that has no effect, if there is anything."""
        return f"{self.path}: without effect here: {', '.join(self.ignored)}" if self.ignored else None


def read_tune_file(path: str | Path) -> TuneFile:
    """Read a file. Raises TuneRefused, ExtraMissing."""
    path = Path(path).expanduser()
    try:
        import yaml
    except ImportError as error:
        raise ExtraMissing("yaml", f"{path} is YAML") from error
    try:
        found = _expand_variables(_loader(yaml)(path.read_text(encoding="utf-8")).get_single_data(), yaml)
    except OSError as error:
        raise TuneRefused(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise TuneRefused(f"{path}: this is not YAML: {error}") from None
    except LookupError as error:
        raise TuneRefused(f"{path}: {error.args[0]}") from None
    if not isinstance(found, dict):
        raise TuneRefused(f"{path}: this is not a mapping of options")
    reader = _FileReader(path, found)
    try:
        return reader.read()
    except TuneRefused as error:
        raise TuneRefused(f"{path}: {error}") from None


def _loader(yaml: Any) -> Any:
    """YAML as Trinity's OmegaConf reads it: `1e-6` is a number, as in YAML 1.2."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))  # type: ignore[attr-defined]
    return loader


def _expand_variables(value: Any, yaml: Any) -> Any:
    """The value with what `${oc.env:NAME}` and `${oc.env:NAME,default}` stand for. Raises LookupError."""
    if isinstance(value, dict):
        return {name: _expand_variables(each, yaml) for name, each in value.items()}
    if isinstance(value, list):
        return [_expand_variables(each, yaml) for each in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def expand(found: re.Match[str]) -> str:
        told = os.environ.get(found["name"], found["default"])
        if told is None:
            raise LookupError(f"{found[0]}: there is no environment variable {found['name']}")
        return told.strip()

    told = _VARIABLE.sub(expand, value)
    if left := re.search(r"\$\{[^}]*\}?", told):
        raise LookupError(f"{left[0]}: only ${{oc.env:NAME}} and ${{oc.env:NAME,default}} are known here")
    if not _VARIABLE.fullmatch(value):
        return told
    loader = _loader(yaml)("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, told, (True, False)), told))


def _of_environment(found: re.Match[str]) -> str:
    name, default = found["name"], found["default"]
    told = os.environ.get(name, default)
    if told is None:
        raise LookupError(f"{found[0]}: there is no environment variable {name}")
    return told.strip()


class _FileReader:
    """Takes options out of a file's mapping, one after the other."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path, self._left = path, options
        self._ignored: list[str] = []

    def read(self) -> TuneFile:
        for name in _WITHOUT_EFFECT:
            if self._take(name) is not None and name != "mode":
                self._ignored.append(name)
        found = self._take("buffer.explorer_input.taskset")
        epochs, steps = self._take("buffer.total_epochs"), self._take_first("buffer.total_steps", "trainer.total_steps")
        train = (
            None
            if found is None
            else self._dataset_of(found, "buffer.explorer_input.taskset", total_epochs=epochs or 1, total_steps=steps)
        )
        evaluations = self._take("buffer.explorer_input.eval_tasksets")
        evaluation = eval_temperature = None
        if evaluations:
            if not isinstance(evaluations, list) or len(evaluations) > 1:
                self._ignored.append("buffer.explorer_input.eval_tasksets beyond the first")
            first = evaluations[0] if isinstance(evaluations, list) else evaluations
            eval_temperature = (first.get("rollout_args") or {}).get("temperature")
            evaluation = self._dataset_of(first, "buffer.explorer_input.eval_tasksets")
        rest = self._take("buffer.explorer_input")
        if isinstance(rest, dict):
            self._ignored += [f"buffer.explorer_input.{each}" for each in rest]
        monitor = self._take("monitor.monitor_type")
        if monitor is not None and monitor not in MONITORS:
            self._ignored.append(f"monitor.monitor_type: {monitor} (curves go to {', '.join(MONITORS)})")
            monitor = None
        runners = self._take("explorer.runner_per_model")
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
        return TuneFile(
            path=self._path,
            model=self._model(),
            algorithm=self._algorithm(),
            train_dataset=train,
            eval_dataset=evaluation,
            auxiliary_models=models,
            project_name=self._take("project"),
            experiment_name=self._take("name"),
            checkpoint_root_dir=self._take("checkpoint_root_dir"),
            monitor_type=monitor,
            concurrency=(None if runners is None else int(runners)),
            run_timeout=self._take("explorer.max_timeout"),
            eval_temperature=eval_temperature,
            settings=_without_empty(self._left),
            ignored=tuple(self._ignored),
        )

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
            "enable_thinking": self._take(f"{rollout}enable_thinking"),
            "tensor_parallel_size": self._take(f"{rollout}tensor_parallel_size"),
            "inference_engine_num": self._take(f"{rollout}engine_num"),
            "reasoning_parser": self._take(f"{rollout}reasoning_parser"),
        }
        self._take(f"{rollout}enable_auto_tool_choice")
        # Without one in the file there is none, as in Trinity: the default is that of AgentScope's tuner.
        parser = self._take(f"{rollout}tool_call_parser")
        tinker = self._take("model.tinker")
        known = {name: value for name, value in given.items() if value is not None}
        adapter = None
        if isinstance(tinker, dict) and tinker.get("enable") is not False:
            names = TinkerConfig.__dataclass_fields__
            adapter = TinkerConfig(**{name: value for name, value in tinker.items() if name in names})
        return TunerModelConfig(str(path), tool_call_parser=parser, tinker_config=adapter, **known)

    def _algorithm(self) -> AlgorithmConfig | None:
        given = {
            "algorithm_type": self._take("algorithm.algorithm_type"),
            "learning_rate": self._take("algorithm.optimizer.lr"),
            "group_size": self._take_first("algorithm.repeat_times", "buffer.group_size"),
            "batch_size": self._take("buffer.batch_size"),
            "eval_interval_steps": self._take("explorer.eval_interval"),
        }
        known = {name: value for name, value in given.items() if value is not None}
        experiences = self._take("buffer.train_batch_size")
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
        warmup = self._take("algorithm.optimizer.lr_warmup_steps")
        if warmup is not None and warmup > 0:
            self._left.setdefault("algorithm", {}).setdefault("optimizer", {})["lr_warmup_steps"] = warmup
        if self._take("buffer.group_by") is not None:
            self._ignored.append("buffer.group_by (the algorithm says it)")
        return AlgorithmConfig(**known)

    def _dataset_of(self, found: Any, name: str, **how: Any) -> DatasetConfig:
        if not isinstance(found, dict) or not found.get("path"):
            raise TuneRefused(f"{name}: path is missing")
        used = {"path", "subset_name", "split", "name", "rollout_args", "storage_type"}
        self._ignored += [f"{name}.{each}" for each in found if each not in used]
        path = Path(str(found["path"]))
        beside = self._path.parent / path
        return DatasetConfig(
            str(beside if not path.is_absolute() and not path.exists() and beside.exists() else path),
            name=found.get("subset_name"),
            split=found.get("split") or "train",
            **how,
        )

    def _take_first(self, *names: str) -> Any:
        found = [self._take(name) for name in names]
        return next((each for each in found if each is not None), None)

    def _take(self, name: str) -> Any:
        """The value of an option, which is out of the file then; None if it is not there."""
        *sections, last = name.split(".")
        place: Any = self._left
        for each in sections:
            place = place.get(each) if isinstance(place, dict) else None
        return place.pop(last, None) if isinstance(place, dict) else None


def _without_empty(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _without_empty(each) if isinstance(each, Mapping) else each for name, each in settings.items()}
    return {name: each for name, each in found.items() if each != {} and each is not None}
