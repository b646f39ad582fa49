"""Names: ours alone, and saying what a thing is."""

import ast
import re
from importlib.metadata import packages_distributions

from sources import SOURCES, Function, classes, functions

from tuneloop.cli.package_names import OWNERS, refuse_foreign_packages

EMPTY_WORDS = re.compile(r"Manager|Handler|Helper|Util|Processor|Wrapper|^_?Base(?=[A-Z]|$)|Base$|Abstract")
#: A function is named by what it does or returns, not by what has been done to something. Regular ones end in -ed.
PARTICIPLES = set(
    [
        "awaited",
        "bought",
        "felt",
        "found",
        "given",
        "gone",
        "heard",
        "held",
        "kept",
        "known",
        "learnt",
        "left",
        "lent",
        "made",
        "meant",
        "said",
        "seen",
        "shown",
        "sold",
        "spoken",
        "taken",
        "taught",
        "thought",
        "told",
        "understood",
        "written",
    ]
)
#: They end in -ed and are none, or are decided on: a teacher's retries are told that one has succeeded.
NO_PARTICIPLES = {"embed", "feed", "need", "seed", "speed", "succeeded"}
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


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in PARTICIPLES or ("_" not in word and word.endswith("ed") and word not in NO_PARTICIPLES)


def is_a_question(function: Function) -> bool:
    """Whether it answers yes or no, or is read like an attribute: there a participle is an adjective."""
    decorators = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    answers = function.returns is not None and ast.unparse(function.returns) == "bool"
    return answers or not decorators.isdisjoint({"property", "cached_property"})


def test_no_function_is_named_by_a_bare_participle():
    found = [
        f"{source.path}: {node.name}"
        for source, node in functions()
        if is_participle(node.name) and not (is_a_question(node) and node.name.strip("_") not in PARTICIPLES)
    ]
    assert found == []


def test_participles_are_found():
    names = ("told", "_said", "verified", "verify", "cached_replies", "feed", "need", "_sealed")
    assert [name for name in names if is_participle(name)] == ["told", "_said", "verified", "_sealed"]
