"""This file turns YAML into plain values and remembers where each key stood."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Keys = tuple[str | int, ...]
_NOTHING = object()


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a value was written: a line and column of a file, or a variable or flag (those sort last)."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Something wrong at a place. `key` is the dotted name, or empty where none applies."""

    place: Place
    key: str
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place.text, self.key, self.what) if part)


@dataclass(slots=True)
class Tree:
    """The values of a file, the place of each, and what was wrong with the YAML itself."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Keys, Place] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def place_of(self, keys: Keys) -> Place:
        """The place of `keys`, or of the nearest section around it that was written."""
        for length in range(len(keys), -1, -1):
            if keys[:length] in self.places:
                return self.places[keys[:length]]
        raise KeyError(keys)


def read(path: Path) -> Tree:
    """The tree of a YAML file. Mistakes are returned in it, never raised."""
    tree = Tree(places={(): Place(1, 1, f"{path}:1:1")})
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        root = loader.get_single_node()
        if root is None:
            raise _Wrong("the file is empty; at least model.model_path is needed", None)
        if not isinstance(root, yaml.MappingNode):
            raise _Wrong("the file must be a mapping: `key: value` lines", root.start_mark)
        tree.values = _Reader(path, loader, tree).mapping(root, ())
    except OSError as error:
        tree.mistakes.append(Mistake(place=Place(0, 0, str(path)), key="", what=f"cannot be read: {error.strerror}"))
    except (_Wrong, yaml.YAMLError) as error:
        tree.mistakes.append(Mistake(place=_place(path, error), key="", what=_sentence(error)))
    except RecursionError:
        tree.mistakes.append(Mistake(place=tree.places[()], key="", what="nested too deeply"))
    finally:
        if loader is not None:
            loader.dispose()
    return tree


class _Wrong(Exception):
    def __init__(self, what: str, mark: yaml.Mark | None) -> None:
        super().__init__(what)
        self.problem_mark = mark


def _place(path: Path, error: Exception) -> Place:
    mark = getattr(error, "problem_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return Place(line, column, f"{path}:{line}:{column}")


def _sentence(error: Exception) -> str:
    if isinstance(error, _Wrong):
        return str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        return f"not YAML: {', '.join(part for part in (error.context, error.problem) if part)}"
    return f"not YAML: {getattr(error, 'reason', str(error))}"


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, path: Path, loader: yaml.SafeLoader, tree: Tree) -> None:
        self._path, self._loader, self._tree = path, loader, tree

    def mapping(self, node: yaml.MappingNode, at: Keys) -> dict[str, Any]:
        """The values of a mapping; a key written twice is a mistake, the first one counts."""
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for mapping in self._merged(value_node, at):
                    merged = self.mapping(mapping, at) | merged
                continue
            key = self._key(key_node, at)
            if key is None:
                continue
            if key in first:
                self._wrong((*at, key), key_node, f"written twice, first in line {first[key]}")
                continue
            first[key] = key_node.start_mark.line + 1
            self._tree.places[(*at, key)] = self._at(key_node)
            value = self._value(value_node, (*at, key))
            if value is not _NOTHING:
                values[key] = value
        return merged | values

    def _merged(self, node: yaml.Node, at: Keys) -> Iterator[yaml.MappingNode]:
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(each, yaml.MappingNode):
                yield each
            else:
                self._wrong(at, each, "`<<` takes a mapping or a list of mappings")

    def _key(self, node: yaml.Node, at: Keys) -> str | None:
        value = self._value(node, at) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str):
            return value
        self._wrong(at, node, "a key must be text; write it in quotes")
        return None

    def _value(self, node: yaml.Node, at: Keys) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = [self._item(item, (*at, index)) for index, item in enumerate(node.value)]
            return [item for item in items if item is not _NOTHING]
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            self._wrong(at, node, f"not a plain value: {problem}")
            return _NOTHING

    def _item(self, node: yaml.Node, at: Keys) -> Any:
        self._tree.places[at] = self._at(node)
        return self._value(node, at)

    def _at(self, node: yaml.Node) -> Place:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        return Place(line, column, f"{self._path}:{line}:{column}")

    def _wrong(self, at: Keys, node: yaml.Node, what: str) -> None:
        self._tree.mistakes.append(Mistake(place=self._at(node), key=dotted(at), what=what))


def dotted(keys: Keys) -> str:
    """`a.b[0]` for ("a", "b", 0)."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
