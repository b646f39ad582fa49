"""Reads the settings from a YAML file, environment variables and `--set` flags; writes and connects nothing.

Reports every problem at once, one a line, with its place and the nearest valid name.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError

import tuneloop.runner.trinity as trinity
from tuneloop.shared.errors import SettingsError
from tuneloop.shared.settings.hub_cache import cached_folder
from tuneloop.shared.settings.problems import ENV_PREFIX, Keys, dotted_name, sentences_of, sort_unknown
from tuneloop.shared.settings.settings import Settings, may_be_secret

#: The variable in which `tuneloop run` hands flags on that must not stand on a command line, as a list in JSON.
OVERRIDES_VARIABLE = "TUNELOOP_OVERRIDES"

#: A line and column of a file, or a variable or flag, which sort last; and how it is written.
_Place = tuple[int, int, str]
_AFTER_THE_FILE = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReport:
    """What the sources say: the settings, or every problem in them; and the keys of Trinity's that do nothing here."""

    settings: Settings | None
    problems: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    names_tasks: bool = False

    @property
    def warning(self) -> str | None:
        """One line that names the keys without effect, or None."""
        return f"settings ignored: {', '.join(self.ignored)}" if self.ignored else None

    @property
    def is_of_tune(self) -> bool:
        """Whether services with this file would wait for requests that no client sends."""
        return self.names_tasks and self.settings is not None and self.settings.mode == "both"

    def valid_settings(self) -> Settings:
        """The settings. Raises SettingsError with every problem, one a line."""
        if self.settings is None:
            raise SettingsError("\n".join(self.problems))
        return self.settings


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file. Raises SettingsError with every problem, one a line."""
    report = read_settings(path, overrides)
    settings = report.valid_settings()
    if report.warning:
        logging.getLogger(__name__).warning(report.warning)
    return settings


def read_settings(
    path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> SettingsReport:
    """Read `path`, the environment's TUNELOOP__SECTION__KEY variables and `key=value` overrides, later ones winning."""
    read = _Reading(path)
    values = read.file()
    if values is None:
        return SettingsReport(settings=None, problems=tuple(read.lines()))
    if trinity.is_verls(values):
        return SettingsReport(settings=None, problems=(f"{path}:1:1: {trinity.VERLS_FORMAT}",))
    values, unexpanded = trinity.expand(values)
    names_tasks = trinity.names_tasks(values)
    ignored, untranslated = trinity.translate(values, tasks=names_tasks)
    nodes = trinity.number(trinity.find(values, "cluster.node_num")) or 1
    if names_tasks and nodes > 1 and values.get("mode") in {None, "both"}:
        read.report(("cluster", "node_num"), trinity.ONE_MACHINE.format(int(nodes)))
        values["cluster"]["node_num"] = 1
        trinity.pop_option(values, "explorer.rollout_model.engine_num")  # they were for all machines
    values.setdefault("model", {})  # so that what is missing is model.model_path
    environment = os.environ if environment is None else environment
    for name, text in sorted(environment.items()):
        if name.startswith(ENV_PREFIX):
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            read.override(values, keys, text, (_AFTER_THE_FILE, 0, name))
    for flag in [*json.loads(environment.get(OVERRIDES_VARIABLE, "[]")), *overrides]:
        key, equals, text = flag.partition("=")
        name = key if equals else re.sub(r"[^\w.].*", "", key)  # what follows may be a secret
        place = (_AFTER_THE_FILE, 1, f"--set {name}")
        if equals and key.strip():
            read.override(values, key.strip().split("."), text, place)
        else:
            read.problems.append((place, "write it as --set key=value"))
    settings, errors = _validate(values)
    told = _report_trinitys(read, values, untranslated, unexpanded)
    errors = [each for each in errors if each["loc"] not in told]
    if errors:
        unknown = [each for each in errors if each["type"] == "extra_forbidden"]
        wrong = [each for each in errors if each not in unknown]
        settings, contradictions = _validate_rest(values, errors, wrong)
        found = [pair for each in unknown for pair in sort_unknown(each["loc"], each["input"], ignored)]
        found += [pair for each in [*wrong, *contradictions] for pair in sentences_of(each)]
        for keys_of_it, what in found:
            read.report(keys_of_it, what)
    if settings is not None:
        settings = _on_this_machine(settings)
    return SettingsReport(
        settings=None if read.problems else settings,
        problems=tuple(read.lines()),
        ignored=tuple(sorted(ignored)),
        names_tasks=names_tasks,
    )


def _report_trinitys(
    read: "_Reading",
    values: Mapping[str, Any],
    untranslated: Sequence[tuple[str, str]],
    unexpanded: trinity.Unexpanded,
) -> set[Keys]:
    """Report what of Trinity's cannot be followed; where unexpanded values stood, not to be reported again."""
    for name, what in untranslated:
        read.report(tuple(name.split(".")), what)
    told = set()
    for keys, what in unexpanded:
        name = ".".join(map(str, keys))
        if not trinity.is_ignored(name) and "${" in str(trinity.find(values, name)):
            read.report(keys, what)
            told.add(keys)
    return told


class _Reading:
    """Keys read so far, with their places, and the problems."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[Keys, _Place] = {(): self._place(None)}
        self.problems: list[tuple[_Place, str]] = []

    def lines(self) -> list[str]:
        return [f"{place[2]}: {what}" for place, what in sorted(self.problems, key=lambda each: each[0])]

    def report(self, keys: Keys, what: str) -> None:
        """A problem at `keys`, or at the nearest section around it that was written."""
        around = (keys[:length] for length in range(len(keys), -1, -1))
        place = next(self._places[each] for each in around if each in self._places)
        self.problems.append((place, f"{dotted_name(keys)}: {what}" if keys else what))

    def file(self) -> dict[str, Any] | None:
        """The values of the file; None if it cannot be understood."""
        mark: yaml.Mark | None = None
        try:
            loader = yaml.SafeLoader(self._path.read_bytes())
            root = loader.get_single_node()
            if root is None:
                what = "the file is empty; at least model.model_path is needed"
            elif not isinstance(root, yaml.MappingNode):
                mark, what = root.start_mark, "the file must be a mapping: `key: value` lines"
            else:
                self._locate(root, ())
                return dict(loader.construct_document(root))
        except OSError as error:
            self.problems.append(((0, 0, str(self._path)), f"cannot be read: {error.strerror}"))
            return None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            # It quotes what stands behind `*`, which may be a secret that lacks its quotes.
            is_composed = isinstance(error, ComposerError)
            what = "not YAML: " + (reason.partition("'")[0].rstrip() if is_composed else reason)
        except yaml.YAMLError as error:
            what = f"not YAML: {getattr(error, 'reason', 'unreadable')}"
        except ValueError:
            what = "a value is no date or number, though it looks like one: write it in quotes"
        except RecursionError:
            what = "nested too deeply"
        self.problems.append((self._place(mark), what))
        return None

    def _locate(self, node: yaml.Node, at: Keys) -> None:
        """Store the place of each key and item; a duplicate key is a problem."""
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                keys = (*at, key.value) if key.tag == "tag:yaml.org,2002:str" else at
                if keys in self._places and keys != at:
                    what = f"{dotted_name(keys)}: written twice, first in line {self._places[keys][0]}"
                    self.problems.append((self._place(key.start_mark), what))
                elif keys != at:
                    self._places[keys] = self._place(key.start_mark)
                elif key.tag != "tag:yaml.org,2002:merge":
                    self.problems.append((self._place(key.start_mark), "a key must be text; write it in quotes"))
                self._locate(value, keys)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._places[(*at, index)] = self._place(item.start_mark)
                self._locate(item, (*at, index))

    def _place(self, mark: yaml.Mark | None) -> _Place:
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return line, column, f"{self._path}:{line}:{column}"

    def override(self, values: dict[str, Any], keys: Sequence[str], text: str, place: _Place) -> None:
        """Put a value in the place of the file's. Lists and null are as in YAML; everything else stays text."""
        section = values
        for depth, key in enumerate(keys[:-1], start=1):
            inner = section.get(key)
            if not isinstance(inner, dict):
                self._places[tuple(keys[:depth])] = place
            section[key] = section = dict(inner) if isinstance(inner, dict) else {}
        wanted = tuple(keys)
        self._places = {each: at for each, at in self._places.items() if each[: len(wanted)] != wanted}
        self._places[wanted] = place
        try:
            is_yaml = text.strip() in {"null", "~"} or text.strip()[:1] in {"[", "{"}
            section[keys[-1]] = yaml.safe_load(text) if is_yaml else text
        except yaml.YAMLError:
            self.report(wanted, f"not a value: {'the value given' if may_be_secret('.'.join(keys)) else text}")


def _on_this_machine(settings: Settings) -> Settings:
    """The settings with the folders that are meant here; a model that the Hub names keeps its name for clients."""
    model, distill = settings.model, settings.algorithm.distill
    found: dict[str, Any] = {"checkpoint_root_dir": Path.cwd() / settings.checkpoint_root_dir}
    if (folder := cached_folder(model.model_path)) != model.model_path:
        moved = {"model_path": folder, "served_model_name": settings.served_model_name}
        found["model"] = model.model_copy(update=moved)
    if distill.teacher_path and (folder := cached_folder(distill.teacher_path)) != distill.teacher_path:
        moved = {"distill": distill.model_copy(update={"teacher_path": folder})}
        found["algorithm"] = settings.algorithm.model_copy(update=moved)
    return settings.model_copy(update=found)


def _validate(values: Mapping[str, Any]) -> tuple[Settings | None, list[ErrorDetails]]:
    try:
        return Settings.model_validate(values), []
    except ValidationError as error:
        found = error.errors(include_url=False)
        return None, [each for each in found if each["type"] != "invalid_key"]  # reported with their place


def _validate_rest(
    values: dict[str, Any], errors: Sequence[ErrorDetails], wrong: Sequence[ErrorDetails]
) -> tuple[Settings | None, list[ErrorDetails]]:
    """The settings without refused options, and the problems between options that are valid alone."""
    for each in errors:
        section: Any = values
        for key in each["loc"]:
            inner = section.get(key)
            if key == each["loc"][-1] or not isinstance(inner, dict):
                section.pop(key, None)
                break
            section[key] = section = dict(inner)
    values["model"] = {"model_path": "."} | (values.get("model") or {})
    settings, left = _validate(values)
    doubted = {str(each["loc"][-1]) for each in wrong if each["loc"]}
    reported = {each["msg"] for each in wrong}
    found = [each for each in left if not each["loc"] and each["msg"] not in reported]
    return settings, [each for each in found if not any(key in each["msg"] for key in doubted)]
