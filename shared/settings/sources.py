"""The sources of settings: a YAML file, environment variables and `--set` flags, with the location of each key."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from yaml.composer import ComposerError

from tuneloop.shared.settings.settings import may_be_secret

ENV_PREFIX = "TUNELOOP__"

#: The variable in which `tuneloop run` hands flags on that must not stand on a command line, as a list in JSON.
OVERRIDES_VARIABLE = "TUNELOOP_OVERRIDES"

Keys = tuple[str | int, ...]
_NOTHING = object()
_AFTER_THE_FILE = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class SourceLocation:
    """Where a value was written: a line and column of a file, or a variable or flag (those sort last)."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsProblem:
    """Something wrong at a location. `key` is the dotted name, or empty where none applies."""

    location: SourceLocation
    key: str
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.location.text, self.key, self.what) if part)


class LocatedSource(PydanticBaseSettingsSource):
    """Values, the location of each, and what is wrong with how they were written."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls)
        self.values: dict[str, Any] = {}
        self.locations: dict[Keys, SourceLocation] = {}
        self.problems: list[SettingsProblem] = []
        #: What sources of less rank must leave out.
        self.overridden: list[Keys] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """As the base class wants it."""
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All values, section in section."""
        return self.values

    def remove(self, keys: Keys) -> None:
        """Leave `keys` out, and whatever stands where a section around them should."""
        section = self.values
        for depth, key in enumerate(keys, start=1):
            inner = section.get(str(key))
            if depth == len(keys) or not isinstance(inner, dict):
                section.pop(str(key), None)
                self.locations = {each: at for each, at in self.locations.items() if each[:depth] != keys[:depth]}
                return
            section = inner

    def _report(self, location: SourceLocation, keys: Keys, what: str) -> None:
        self.problems.append(SettingsProblem(location=location, key=dotted_name(keys), what=what))


class OverridesSource(LocatedSource):
    """Single values by their dotted names, later ones winning."""

    @classmethod
    def of_environment(cls, settings_cls: type[BaseSettings], environment: Mapping[str, str]) -> "OverridesSource":
        """The variables `TUNELOOP__SECTION__KEY`."""
        source = cls(settings_cls)
        for name, value in sorted(environment.items()):
            if name.startswith(ENV_PREFIX):
                keys = name.removeprefix(ENV_PREFIX).lower().split("__")
                source._set(keys, value, SourceLocation(_AFTER_THE_FILE, 0, name))
        return source

    @classmethod
    def of_flags(cls, settings_cls: type[BaseSettings], flags: Iterable[str]) -> "OverridesSource":
        """The flags `--set section.key=value`."""
        source = cls(settings_cls)
        for flag in flags:
            key, equals, value = flag.partition("=")
            name = key if equals else re.sub(r"[^\w.].*", "", key)  # what follows may be a secret
            location = SourceLocation(_AFTER_THE_FILE, 1, f"--set {name}")
            if equals and key.strip():
                source._set(key.strip().split("."), value, location)
            else:
                source._report(location, (), "write it as --set key=value")
        return source

    def _set(self, keys: Sequence[str], text: str, location: SourceLocation) -> None:
        section = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            if not isinstance(section.get(key), dict):
                section[key] = {}
                self.locations[tuple(keys[:depth])] = location
            section = section[key]
        self.locations[tuple(keys)] = location
        self.overridden.append(tuple(keys))
        try:
            section[keys[-1]] = _parse_value(text)
        except yaml.YAMLError:
            shown = "the value given" if may_be_secret(".".join(keys)) else text
            self._report(location, tuple(keys), f"not a value: {shown}")


def _parse_value(text: str) -> Any:
    """Lists and null as YAML has them; everything else stays text, which the option's own type reads."""
    return yaml.safe_load(text) if text.strip() in {"null", "~"} or text.strip()[:1] in {"[", "{"} else text


class YamlSource(LocatedSource):
    """A YAML file."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path) -> None:
        super().__init__(settings_cls)
        self._path = path
        start = self.locations[()] = self._location(None)
        try:
            self._read()
        except OSError as error:
            self._report(SourceLocation(0, 0, str(path)), (), f"cannot be read: {error.strerror}")
        except _NotMapping as error:
            self._report(self._location(error.mark), (), str(error))
        except yaml.YAMLError as error:
            self._report(self._location(getattr(error, "problem_mark", None)), (), f"not YAML: {_reason(error)}")
        except RecursionError:
            self._report(start, (), "nested too deeply")

    def _read(self) -> None:
        self._loader = yaml.SafeLoader(self._path.read_bytes())
        try:
            root = self._loader.get_single_node()
            if root is None:
                raise _NotMapping("the file is empty; at least model.model_path is needed", None)
            if not isinstance(root, yaml.MappingNode):
                raise _NotMapping("the file must be a mapping: `key: value` lines", root.start_mark)
            self.values = self._mapping(root, ())
        finally:
            self._loader.dispose()

    def _mapping(self, node: yaml.MappingNode, at: Keys) -> dict[str, Any]:
        """The values of a mapping; a key written twice is reported, the first one counts."""
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for mapping in self._merged_nodes(value_node, at):
                    merged = self._mapping(mapping, at) | merged
                continue
            key = self._key(key_node, at)
            if key is None:
                continue
            if key in first:
                self._report_node(key_node, (*at, key), f"written twice, first in line {first[key]}")
                continue
            first[key] = key_node.start_mark.line + 1
            self.locations[(*at, key)] = self._location(key_node.start_mark)
            value = self._value(value_node, (*at, key))
            if value is not _NOTHING:
                values[key] = value
        return merged | values

    def _merged_nodes(self, node: yaml.Node, at: Keys) -> Iterator[yaml.MappingNode]:
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(each, yaml.MappingNode):
                yield each
            else:
                self._report_node(each, at, "`<<` takes a mapping or a list of mappings")

    def _key(self, node: yaml.Node, at: Keys) -> str | None:
        value = self._value(node, at) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str):
            return value
        self._report_node(node, at, "a key must be text; write it in quotes")
        return None

    def _value(self, node: yaml.Node, at: Keys) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = [self._item(item, (*at, index)) for index, item in enumerate(node.value)]
            return [item for item in items if item is not _NOTHING]
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            problem = f": {error.problem if isinstance(error, yaml.MarkedYAMLError) else error}"
            self._report_node(node, at, "not a plain value" + ("" if may_be_secret(dotted_name(at)) else problem))
            return _NOTHING

    def _item(self, node: yaml.Node, at: Keys) -> Any:
        self.locations[at] = self._location(node.start_mark)
        return self._value(node, at)

    def _location(self, mark: yaml.Mark | None) -> SourceLocation:
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return SourceLocation(line, column, f"{self._path}:{line}:{column}")

    def _report_node(self, node: yaml.Node, at: Keys, what: str) -> None:
        self._report(self._location(node.start_mark), at, what)


class _NotMapping(Exception):
    def __init__(self, what: str, mark: yaml.Mark | None) -> None:
        super().__init__(what)
        self.mark = mark


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        # It quotes what stands behind `*`, which may be a secret that lacks its quotes.
        return reason.partition("'")[0].rstrip() if isinstance(error, ComposerError) else reason
    return str(getattr(error, "reason", error))


def dotted_name(keys: Keys) -> str:
    """`a.b[0]` for ("a", "b", 0)."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
