"""Names: ours alone, and saying what a thing is."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from sources import ALL_SOURCES, SOURCES, Function, Source, classes, functions

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
#: Of people who talk. Those of the field are response, event, signal, feedback, report, resume.
TALK = {
    "gone",
    "hear",
    "heard",
    "remark",
    "remarks",
    "said",
    "saying",
    "sayings",
    "spoken",
    "told",
    "tally",
    "classroom",
}
#: Pictures and people in docstrings, messages and comments.
REFUSED_IN_CODE = re.compile(
    r"\b(?:told|somebody|nobody|anybody|whom|hears?|heard|anew|reckon\w*|sp(?:oke|oken|eaks?)|voices?|mend(?:s|ed)"
    r"|believed?|of theirs|dear)\b"
)
EMPTY_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}


def test_the_names_of_our_packages_are_ours_alone():
    owners = packages_distributions()
    assert set(owners["tuneloop"]) == {"tuneloop", "tuneloop-runner"}


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
        for source, node in functions(ALL_SOURCES)
        if is_participle(node.name) and not (is_a_question(node) and node.name.strip("_") not in PARTICIPLES)
    ]
    assert found == []


def test_participles_are_found():
    names = ("told", "_said", "verified", "verify", "cached_replies", "feed", "need", "_sealed")
    assert [name for name in names if is_participle(name)] == ["told", "_said", "verified", "_sealed"]


def names_in(source: Source) -> Iterator[str]:
    """The names of a file's classes, functions, parameters and attributes; those of locals are their functions' own."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            yield from (each.id for each in fields if isinstance(each, ast.Name))
        elif isinstance(node, Function):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    """The words of a name, in small letters.

    >>> sorted(words_of("_TellerOf_what"))
    ['of', 'teller', 'what']
    """
    return set(re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower()))


def test_no_class_parameter_or_attribute_is_named_after_talk():
    found = [f"{source.path}: {name}" for source in ALL_SOURCES for name in names_in(source) if words_of(name) & TALK]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "class ThingsSaid: pass",
        "class Entry:\n    sayings: int",
        "def ask(*, heard): pass",
        "def f(self):\n    self._told = 1",
        "lambda remark: 1",
        "async def hear_all(): pass",
    ],
)
def test_talk_is_found(text: str, tmp_path: Path):
    (tmp_path / "source.py").write_text(text)
    [name] = [name for name in names_in(Source(tmp_path / "source.py", tmp_path)) if words_of(name) & TALK]
    assert name in text


def test_the_words_of_the_code_are_the_fields() -> None:
    found: list[tuple[str, str]] = []
    for source in SOURCES:
        words = [each.value for each in ast.walk(source.tree) if isinstance(each, ast.Constant)]
        tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
        words += [each.string for each in tokens if each.type == tokenize.COMMENT]
        texts = [each for each in words if isinstance(each, str) and " " in each]
        found += [(str(source.path), each[0]) for text in texts for each in REFUSED_IN_CODE.finditer(text)]
    assert found == []
