"""Reads single functions of other packages out of their wheels, as written, without installing the packages."""

import __future__

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Wheel:
    """One package, by the beginning of its wheel's name: `Wheel(folder, "verl")`."""

    def __init__(self, folder: Path, name: str) -> None:
        (self.path,) = folder.glob(f"{name}-*.whl")
        self.package, self.version = self.path.name.split("-")[:2]

    def take(self, file: str, names: list[str], given: dict[str, Any]) -> dict[str, Any]:
        """The functions and classes `names` of `file`, without decorators, as they see the names `given`.

        `Class.method` is that method as a plain function.
        """
        tree = self._tree(file)
        taken = [_found(tree, name.split(".")) for name in names]
        return self._run(taken, file, given)

    def run(self, file: str, function: str, test: str, given: dict[str, Any], *, assigns: str) -> dict[str, Any]:
        """What the `if test:` in `function` that assigns to `assigns` does with the names `given`."""
        found = [
            node
            for node in ast.walk(_found(self._tree(file), function.split(".")))
            if isinstance(node, ast.If) and ast.unparse(node.test) == test and assigns in _assigned(node)
        ]
        return self._run(found[:1], file, given)

    def _tree(self, file: str) -> ast.Module:
        with zipfile.ZipFile(self.path) as wheel:
            (path,) = [path for path in wheel.namelist() if path.endswith(file)]
            return ast.parse(wheel.read(path))

    def _run(self, nodes: list[Any], file: str, given: dict[str, Any]) -> dict[str, Any]:
        assert nodes, file
        module = ast.Module(body=nodes, type_ignores=[])
        lazily = __future__.annotations.compiler_flag
        names = dict(given)
        exec(compile(module, f"{self.path.name}/{file}", "exec", flags=lazily), names)  # noqa: S102
        return names


def _found(tree: ast.AST, name: list[str]) -> Any:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name[0]:
            if len(name) > 1:
                return _found(node, name[1:])
            node.decorator_list = []
            return node
    raise LookupError(name)


def _assigned(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))
