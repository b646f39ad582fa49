"""This file reads the settings: a YAML file, then environment variables, then `--set` flags.

Every mistake is reported at once, a line each, with its place and the nearest right name. Nothing is written, asked or
connected.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.database_url import parse_url
from tuneloop.shared.settings.mistakes import (
    ENV_PREFIX,
    is_trinity_key,
    is_trinity_section,
    mistakes_of,
    nearest_name,
)
from tuneloop.shared.settings.settings import Settings, inner_section
from tuneloop.shared.settings.types import Section
from tuneloop.shared.settings.yaml_source import Keys, Mistake, Place, Tree, dotted, read

_DATABASE = ("buffer", "trainer_input", "experience_buffer", "path")
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
            place = Place(_AFTER_THE_FILE, 1, f"--set {key}")
            if equals and key.strip():
                _override(tree, key.strip().split("."), value, place)
            else:
                tree.mistakes.append(Mistake(place=place, key="", what="write it as --set key=value"))
        return _understand(tree)
    return _report(tree, None, [])


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
    _check_database(tree)
    try:
        settings = Settings.model_validate(tree.values)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        for each in [*wrong, *_contradictions(tree.values, wrong)]:
            tree.mistakes += mistakes_of(tree, each)
        return _report(tree, None, trinity_only)
    root = Path.cwd() / settings.checkpoint_root_dir
    return _report(tree, settings.model_copy(update={"checkpoint_root_dir": root}), trinity_only)


def _sift(tree: Tree, values: dict[str, Any], section: type[Section], at: Keys, trinity_only: list[str]) -> None:
    """Take out what is not ours, noting whether Trinity knows it, and give every section of ours a mapping."""
    for key in [key for key in values if key not in section.model_fields]:
        _sift_foreign(tree, values.pop(key), (*at, key), trinity_only)
    for key, field in section.model_fields.items():
        inner = inner_section(field)
        if inner and values.get(key) is None:
            values[key] = {}
        if inner and isinstance(values[key], dict):
            _sift(tree, values[key], inner, (*at, key), trinity_only)


def _sift_foreign(tree: Tree, value: Any, at: Keys, trinity_only: list[str]) -> None:
    names = [str(key) for key in at]
    if is_trinity_key(names):
        trinity_only.append(dotted(at))
    elif is_trinity_section(names) and isinstance(value, dict | None):
        for key, inner in (value or {}).items():
            _sift_foreign(tree, inner, (*at, key), trinity_only)
    else:
        what = f"unknown key.{nearest_name(names)}"
        tree.mistakes.append(Mistake(place=tree.place_of(at), key=dotted(at), what=what))


def _check_database(tree: Tree) -> None:
    url = _value(tree.values, _DATABASE)
    if isinstance(url, str):
        try:
            parse_url(url)
        except SettingsError as error:
            what = str(error).partition(": ")[2]
            tree.mistakes.append(Mistake(place=tree.place_of(_DATABASE), key=dotted(_DATABASE), what=what))


def _value(values: Any, keys: Keys) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _contradictions(values: dict[str, Any], wrong: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """What is still wrong between options that are right by themselves, found by leaving the wrong ones out."""
    for each in wrong:
        section = _value(values, each["loc"][:-1])
        if isinstance(section, dict) and each["loc"]:
            section.pop(each["loc"][-1], None)
    values["model"] = {"model_path": "."} | values.get("model", {})
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        doubted = {str(each["loc"][-1]) for each in wrong if each["loc"]}
        found = [each for each in error.errors(include_url=False) if not each["loc"]]
        known = {each["msg"] for each in wrong}
        return [each for each in found if each["msg"] not in known and not any(key in each["msg"] for key in doubted)]
    return []


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
