"""The source files that the rules are about."""

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

#: The folders that are installed as tuneloop.explorer, tuneloop.trainer and so on.
PACKAGES = ("shared", "explorer", "trainer", "cli", "runner", "migrations")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """A Python file of ours, by its path below the repository."""

    def __init__(self, file: Path, root: Path = ROOT) -> None:
        self.path = file.relative_to(root)
        self.text = file.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def _sources(*folders: str) -> list[Source]:
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return [Source(file) for file in files if "build" not in file.parts]


#: What is installed, and with it what is run from a checkout.
SOURCES = _sources(*PACKAGES)
ALL_SOURCES = [*SOURCES, *_sources("benchmarks", "examples")]


def classes() -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                yield source, node


def functions(sources: Sequence[Source] = SOURCES) -> Iterator[tuple[Source, Function]]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, Function):
                yield source, node


def lines(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
