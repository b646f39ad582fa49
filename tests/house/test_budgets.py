"""Budgets of the whole: each number is the most that there may be, and only falls.

Who adds a mechanism takes another one away. Lower a number when there is less.
"""

import ast
from collections import Counter

from sources import ROOT, SOURCES, functions

SOURCE_LINES = 67_383
TEST_LINES = 81_394
OPTIONS = 172
#: Per thousand of all functions.
PRIVATE_USED_ONCE = 121


def test_the_source_does_not_grow() -> None:
    assert sum(len(source.text.splitlines()) for source in SOURCES) <= SOURCE_LINES


def test_the_tests_do_not_grow() -> None:
    files = [file for file in (ROOT / "tests").rglob("*.py") if "node_modules" not in file.parts]
    assert sum(len(file.read_text().splitlines()) for file in files) <= TEST_LINES


def test_the_options_do_not_grow() -> None:
    options = (ROOT / "tests/house/options.txt").read_text().splitlines()
    assert len(options) <= OPTIONS


def test_functions_are_not_cut_into_pieces_that_are_used_once() -> None:
    """A private function that one place calls is read there more quickly than elsewhere."""
    used_once = every = 0
    for source in SOURCES:
        names = Counter(
            each.id if isinstance(each, ast.Name) else each.attr
            for each in ast.walk(source.tree)
            if isinstance(each, ast.Name | ast.Attribute)
        )
        found = [node for _, node in functions([source])]
        every += len(found)
        private = [node.name for node in found if node.name.startswith("_") and not node.name.startswith("__")]
        used_once += sum(names[name] == 1 for name in private)
    assert used_once * 1000 <= PRIVATE_USED_ONCE * every
