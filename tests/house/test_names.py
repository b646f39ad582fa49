"""Names: ours alone, and saying what a thing is."""

import ast
import re
from importlib.metadata import packages_distributions

from sources import SOURCES, classes, functions

from tuneloop.cli.package_names import OWNERS, refuse_foreign_packages

EMPTY_WORDS = re.compile(r"Manager|Handler|Helper|Util|Processor|Wrapper|^_?Base(?=[A-Z]|$)|Base$|Abstract")
#: A function is named by what it does or returns, not by what has been done to something.
PARTICIPLES = {
    *("answered", "asked", "awaited", "counted", "felt", "found", "given", "heard", "held", "judged", "kept", "known"),
    *(
        "learned",
        "learnt",
        "listed",
        "made",
        "meant",
        "named",
        "needed",
        "noticed",
        "sampled",
        "said",
        "seen",
        "served",
    ),
    *("shown", "spoken", "taken", "taught", "thought", "told", "tried", "understood", "wanted"),
}
EMPTY_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}


def test_the_names_of_our_packages_are_ours_alone():
    refuse_foreign_packages()
    owners = packages_distributions()
    assert set(owners["tuneloop"]) == OWNERS


def test_no_class_has_an_empty_word_in_its_name():
    found = [f"{source.path}: {node.name}" for source, node in classes() if EMPTY_WORDS.search(node.name)]
    assert found == []


def test_the_empty_words_are_found():
    assert [name for name in ("BaseEngine", "SpoolManager", "Database", "_Base") if EMPTY_WORDS.search(name)] == [
        "BaseEngine",
        "SpoolManager",
        "_Base",
    ]


def test_no_module_is_a_drawer_for_odds_and_ends():
    assert [source.path for source in SOURCES if EMPTY_MODULES & set(source.path.with_suffix("").parts)] == []


def test_every_module_says_what_it_is_for():
    assert [source.path for source in SOURCES if source.text.strip() and not ast.get_docstring(source.tree)] == []


def test_no_function_is_named_by_a_bare_participle():
    found = [f"{source.path}: {node.name}" for source, node in functions() if node.name.strip("_") in PARTICIPLES]
    assert found == []
