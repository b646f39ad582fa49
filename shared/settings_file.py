"""This file reads the settings: a YAML file, then environment variables, then `--set` flags.

Every mistake is reported at once, a line each, with its place and the nearest right name. Nothing is written, asked or
connected.
"""

import difflib
import logging
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared import trinity_keys
from shared.config import Section, Settings
from shared.errors import SettingsError
from shared.yaml_tree import Keys, Mistake, Place, Tree, dotted, read

ENV_PREFIX = "TUNELOOP__"

_AFTER_THE_FILE = 1 << 30
_NOT_NEEDED = (
    "explorer.rollout_model.enable_history",
    "explorer.rollout_model.enable_openai_api",
    "synchronizer.sync_interval",
    "synchronizer.sync_method",
    "trainer.save_hf_checkpoint",
    "trainer.trainer_config",
    "trainer.ulysses_sequence_parallel_size",
)
_SECRETS = {"buffer.trainer_input.experience_buffer.path", "explorer.rollout_model.engine_key"}
_OTHER_ALGORITHMS = (
    "asymre cispo cpt dapo dpo gigpo grpo grpo_verl gspo jsd mix mix_chord multi_step_grpo on_policy_distill opmd raft "
    "rec reinforceplusplus rloo sapo sft sppo topr"
)
_TRINITYS_VALUES: Mapping[str, tuple[Sequence[object], str]] = {
    "mode": (("explore", "bench", "colocate"), "tuneloop serves, trains or does both: write 'both'"),
    "algorithm.algorithm_type": (_OTHER_ALGORITHMS.split(), "tuneloop trains with PPO: write 'ppo'"),
    "algorithm.optimizer.lr_warmup_steps": ((-1,), "Trinity's -1 means no warm-up: write 0"),
    "buffer.trainer_input.experience_buffer.storage_type": (
        ("queue", "file"),
        "tuneloop keeps experiences in a database: write 'sql'",
    ),
    "cluster.node_num": ((0,), "Trinity's 0 asks Ray: write the number of machines"),
    "monitor.monitor_type": (
        ("wandb", "mlflow", "swanlab"),
        "tuneloop writes TensorBoard files and Prometheus metrics: write 'tensorboard'",
    ),
    "synchronizer.sync_method": (
        ("nccl", "memory", "online", "offline"),
        "tuneloop hands weights over by checkpoints: write 'checkpoint'",
    ),
    "trainer.save_interval": ((0,), "Trinity's 0 means only at the end: write after how many steps to publish, e.g. 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a settings file says: the settings, or every mistake in it."""

    settings: Settings | None
    mistakes: tuple[str, ...]
    not_needed: tuple[str, ...]
    trinity_only: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """One line that names the keys without effect, or None."""
        parts = []
        if self.not_needed:
            parts.append(f"accepted but not needed: {', '.join(self.not_needed)}")
        if self.trinity_only:
            parts.append(f"known to Trinity, not used here: {', '.join(self.trinity_only)}")
        return "settings " + "; ".join(parts) if parts else None


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file. Raises SettingsError with every mistake, one a line."""
    report = check(path, overrides)
    if report.settings is None:
        raise SettingsError("\n".join(report.mistakes))
    if report.warning:
        logging.getLogger(__name__).warning(report.warning)
    return report.settings


def check(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Report:
    """Read `path`, the environment's TUNELOOP__SECTION__KEY variables and `key=value` overrides, later ones winning."""
    tree = read(path)
    if not tree.mistakes or tree.values:
        for name, value in sorted((os.environ if environment is None else environment).items()):
            if name.startswith(ENV_PREFIX):
                keys = name.removeprefix(ENV_PREFIX).lower().split("__")
                _override(tree, keys, value, Place(_AFTER_THE_FILE, 0, name))
        for flag in overrides:
            key, equals, value = flag.partition("=")
            place = Place(_AFTER_THE_FILE, 1, f"--set {flag}")
            if equals and key.strip():
                _override(tree, key.strip().split("."), value, place)
            else:
                tree.mistakes.append(Mistake(place=place, key="", what="write it as --set key=value"))
        return _understand(tree)
    return _report(tree, None, [])


def options(section: type[Section] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option by its dotted name."""
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner:
            yield from options(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _section(field: FieldInfo | None) -> type[Section] | None:
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _override(tree: Tree, keys: Sequence[str], text: str, place: Place) -> None:
    values = tree.values
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(values.get(key), dict):
            values[key] = {}
            tree.places[tuple(keys[:depth])] = place
        values = values[key]
    tree.places[tuple(keys)] = place
    try:
        values[keys[-1]] = _plain(text)
    except yaml.YAMLError:
        tree.mistakes.append(Mistake(place=place, key=dotted(tuple(keys)), what=f"not a value: {text}"))


def _plain(text: str) -> Any:
    """Lists and null as YAML has them; everything else stays text, which the option's own type reads."""
    return yaml.safe_load(text) if text.strip() in {"null", "~"} or text.strip()[:1] in {"[", "{"} else text


def _understand(tree: Tree) -> Report:
    trinity_only: list[str] = []
    _sift(tree, tree.values, Settings, (), trinity_only)
    try:
        settings = Settings.model_validate(tree.values)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        for each in [*wrong, *_contradictions(tree.values, wrong)]:
            tree.mistakes += _mistakes(tree, each)
        return _report(tree, None, trinity_only)
    root = Path.cwd() / settings.checkpoint_root_dir
    return _report(tree, settings.model_copy(update={"checkpoint_root_dir": root}), trinity_only)


def _sift(tree: Tree, values: dict[str, Any], section: type[Section], at: Keys, trinity_only: list[str]) -> None:
    """Take out what is not ours, noting whether Trinity knows it, and give every section of ours a mapping."""
    for key in [key for key in values if key not in section.model_fields]:
        _sift_foreign(tree, values.pop(key), (*at, key), trinity_only)
    for key, field in section.model_fields.items():
        inner = _section(field)
        if inner and values.get(key) is None:
            values[key] = {}
        if inner and isinstance(values[key], dict):
            _sift(tree, values[key], inner, (*at, key), trinity_only)


def _sift_foreign(tree: Tree, value: Any, at: Keys, trinity_only: list[str]) -> None:
    names = [str(key) for key in at]
    if trinity_keys.knows(names):
        trinity_only.append(dotted(at))
    elif trinity_keys.is_section(names) and isinstance(value, dict | None):
        for key, inner in (value or {}).items():
            _sift_foreign(tree, inner, (*at, key), trinity_only)
    else:
        what = f"unknown key.{_nearest_name(names)}"
        tree.mistakes.append(Mistake(place=tree.place_of(at), key=dotted(at), what=what))


def _nearest_name(names: Sequence[str]) -> str:
    section, wrong = ".".join(names[:-1]), names[-1]
    ours = [name for name, _ in options()]
    prefix = f"{section}." if section else ""
    siblings = {name.removeprefix(prefix).split(".")[0] for name in ours if name.startswith(prefix)}
    near = difflib.get_close_matches(wrong, sorted(siblings) or trinity_keys.names_under(names[:-1]), n=1)
    near = near or [name for name in ours if name.rpartition(".")[2] == wrong]
    near = near or difflib.get_close_matches(".".join(names), ours, n=1, cutoff=0.75)
    return f" Did you mean '{near[0]}'?" if near else ""


def _contradictions(values: dict[str, Any], wrong: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """What would still be wrong between options if the wrong ones had their defaults."""
    for each in wrong:
        *sections, key = [str(part) for part in each["loc"] if isinstance(part, str)] or [""]
        section = values
        for name in sections:
            section = section.get(name, {}) if isinstance(section.get(name), dict) else {}
        section.pop(key, None)
    values["model"] = {"model_path": "."} | (values.get("model") or {})
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        seen = {each["msg"] for each in wrong}
        return [each for each in error.errors(include_url=False) if not each["loc"] and each["msg"] not in seen]
    return []


def _mistakes(tree: Tree, error: ErrorDetails) -> Iterator[Mistake]:
    at: Keys = error["loc"]
    if error["type"] != "value_error":
        yield Mistake(place=tree.place_of(at), key=dotted(at), what=_what(at, error))
    elif at:
        what = f"{error['ctx']['error']}, not {_shown(at, error['input'])}"
        yield Mistake(place=tree.place_of(at), key=dotted(at), what=what)
    else:
        for line in str(error["ctx"]["error"]).splitlines():
            key, _, what = line.partition(": ")
            yield Mistake(place=tree.place_of(tuple(key.split("."))), key=key, what=what)


def _what(at: Keys, error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] == "missing":
        return "is required and missing"
    if isinstance(value, str) and value.startswith("${"):
        variable = ENV_PREFIX + dotted(at).upper().replace(".", "__")
        return f"{value} is not expanded here: write the value, or set the environment variable {variable}"
    said = error["msg"] if error["type"] == "literal_error" else error["msg"].split(",")[0]
    must = _MUST.get(error["type"], said.replace("Input should be", "must be"))
    return f"{must}, not {_shown(at, value)}{_cure(dotted(at), error['type'], value)}"


def _cure(key: str, kind: str, value: object) -> str:
    trinitys, sentence = _TRINITYS_VALUES.get(key, ((), ""))
    if value in trinitys:
        return f". {sentence}"
    if kind == "literal_error":
        choices = [str(each) for each in get_args(dict(options())[key].annotation)]
        near = difflib.get_close_matches(str(value).lower(), choices, n=1)
        return f". Did you mean '{near[0]}'?" if near else ""
    return ". Write it in quotes" if kind == "string_type" and isinstance(value, int | float | date) else ""


_MUST = {
    "model_type": "must be a section (`key: value` lines)",
    "string_type": "must be text",
    "path_type": "must be a path",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list, such as [a, b]",
    "dict_type": "must be a section (`key: value` lines)",
}


def _shown(at: Keys, value: object) -> str:
    return "the value given" if dotted(at) in _SECRETS else reprlib.repr(value)


def _report(tree: Tree, settings: Settings | None, trinity_only: list[str]) -> Report:
    written = {dotted(keys): keys for keys in tree.places}
    not_needed = [key for key in written if any(key == each or key.startswith(f"{each}.") for each in _NOT_NEEDED)]
    leaves = [key for key in not_needed if not any(other.startswith(f"{key}.") for other in not_needed)]
    mistakes = tuple(map(str, sorted(tree.mistakes, key=lambda each: each.place)))
    return Report(
        settings=None if mistakes else settings,
        mistakes=mistakes,
        not_needed=tuple(sorted(leaves)),
        trinity_only=tuple(sorted(trinity_only)),
    )
