"""The source files that the rules are about."""

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

#: The folders that are installed as tuneloop.explorer, tuneloop.trainer and so on.
PACKAGES = ("shared", "explorer", "trainer", "cli", "runner", "migrations")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """A Python file of ours, by its path below the repository."""

    def __init__(self, file: Path) -> None:
        self.path = file.relative_to(ROOT)
        self.text = file.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


SOURCES = [Source(file) for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def classes() -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                yield source, node


def functions() -> Iterator[tuple[Source, Function]]:
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, Function):
                yield source, node


def lines(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
