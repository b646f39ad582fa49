"""Modules: one meaning for each name, and no import circle."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest
from sources import PACKAGES, SOURCES, classes

#: What a module's name means in every folder that has a module of that name.
MEANINGS = {
    "__main__": "the command that starts the service",
    "attestation": "the periodic proof of the weights that an engine holds",
    "batches": "which rows become a step, and as which tensors",
    "checkpoints": "the folders of versions: written, published and read",
    "drift": "whether the newest replies differ from earlier ones",
    "engines": "the engines that answer requests",
    "errors": "exceptions of ours",
    "evaluation": "a candidate's figures on the gate's tasks",
    "feedback": "what users say of replies after them, on its way to rewards",
    "files": "files of users: of the command line, and those that were uploaded",
    "judge": "a language model that gives a reply a score",
    "judging": "what is judged, and by which rule",
    "keys": "the keys that clients are let in by",
    "ledger": "the ledger: its parts, and the class they hang from",
    "models": "the model behind the replies, as it is trained or called",
    "operations": "what operators look at and do",
    "outbox": "records on disk until somebody has taken them, and what operators do with them",
    "policies": "what is trained apart on one base model, each with versions of its own",
    "proxy": "a request's way to an engine and back",
    "recording": "what is written into the ledger as it comes",
    "rewards": "rewards made from feedback",
    "routes": "what answers HTTP requests",
    "services": "what is started beside the requests or the runs, and put together",
    "settings": "the settings of both services",
    "stored_completions": "OpenAI's stored chat completions",
    "tasks": "tasks of a data set, with what judges them",
    "teacher": "the model that another one imitates",
    "training": "what the trainer does with the rows it leases",
    "versions": "the states of the versions, and what decides about them",
}


def shared_names(paths: Iterator[Path]) -> set[str]:
    """The names of modules and packages that stand in several folders."""
    folders: dict[str, set[Path]] = defaultdict(set)
    for path in paths:
        module = path.parent if path.name == "__init__.py" else path.with_suffix("")
        folders[module.name].add(module.parent)
    return {name for name, where in folders.items() if len(where) > 1}


def test_packages_are_modules_too() -> None:
    paths = [Path(each) for each in ("a/teacher/__init__.py", "a/teacher/teacher.py", "b/gate.py", "c/gate.py", "d.py")]
    assert shared_names(iter(paths)) == {"teacher", "gate"}


def test_a_module_name_means_the_same_in_every_folder() -> None:
    """A new name in several folders? Give it the one meaning that it has in all of them, or another name."""
    assert shared_names(source.path for source in SOURCES) == set(MEANINGS)


def public_classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for source, node in classes():
        if not node.name.startswith("_"):
            found[node.name].append(str(source.path))
    return found


def test_no_two_public_classes_share_a_name() -> None:
    twice = {name: where for name, where in public_classes().items() if len(where) > 1}
    assert twice == {}


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Every set of modules of which each imports each other one, directly or not (Tarjan's algorithm).

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    [{'b', 'c'}]
    """
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        path.append(module)
        for other in sorted(imports.get(module, ())):
            if other not in number:
                visit(other)
            if other in path:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            at = path.index(module)
            circle = set(path[at:])
            del path[at:]
            if len(circle) > 1:
                found.append(circle)

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return found


def test_no_modules_import_each_other() -> None:
    """Under TYPE_CHECKING and inside functions too: who cannot be understood alone is not one module of two."""
    graph = grimp.build_graph(
        *(f"tuneloop.{package}" for package in PACKAGES), exclude_type_checking_imports=False, cache_dir=None
    )
    # What migrates is no package: Alembic reads the files.
    assert len(graph.modules) >= len([each for each in SOURCES if each.path.parts[:2] != ("migrations", "versions")])
    assert circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_imports_of_every_kind_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "__init__.py").touch()
    (tmp_path / "circle" / "a.py").write_text("def late():\n    import circle.b")
    (tmp_path / "circle" / "b.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    import circle.a")
    monkeypatch.syspath_prepend(tmp_path)
    graph = grimp.build_graph("circle", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circles(imports) == [{"circle.a", "circle.b"}]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"a"}}) == [{"a", "b", "c"}]
