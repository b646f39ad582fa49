"""Dependencies: what is imported is declared, what is declared is imported, and the lock has all of it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import ROOT, SOURCES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNNER = tomllib.loads((ROOT / "runner" / "pyproject.toml").read_text())["project"]
LOCK = ROOT / "requirements" / "lock.txt"

#: The extras that a package of ours may import from. What others import of it is imported where it is needed.
EXTRAS = {
    "trainer": {"trainer", "grammar", "ray"},
    "cli": {"parquet"},
    "explorer": {"ray"},
    "shared": {"tracing", "mlflow", "wandb", "ray"},
}

#: Packages that need not be installed here, and are not named as their distribution, or come with it.
NAMED_OTHERWISE = {"mlflow": "mlflow-skinny", "triton": "torch"}


def named(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(tree: ast.AST) -> set[str]:
    """The packages of others that are imported somewhere in a file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"tuneloop"}


@cache
def owners() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(package: str) -> set[str]:
    """Which may have put a package there; one that is not installed is taken to be named as its distribution."""
    return {canonicalize_name(each) for each in owners().get(package, [NAMED_OTHERWISE.get(package, package)])}


def test_every_import_is_declared():
    undeclared: dict[str, set[str]] = {}
    for source in SOURCES:
        runtime = RUNNER if source.path.parts[0] == "runner" else PROJECT
        extras = RUNNER["optional-dependencies"] if runtime is RUNNER else EXTRAS.get(source.path.parts[0], set())
        declared = named(runtime["dependencies"]).union(
            *(named(runtime["optional-dependencies"][extra]) for extra in extras)
        )
        found = {each for each in imported(source.tree) if not distributions(each) & declared}
        if found:
            undeclared[str(source.path)] = found
    assert undeclared == {}


def test_every_dependency_is_imported():
    used = {each for source in SOURCES for package in imported(source.tree) for each in distributions(package)}
    assert named(PROJECT["dependencies"]) - used == {"tuneloop-runner"}  # ours, from the folder beside
    assert named(RUNNER["dependencies"]) <= used


def test_imports_are_found():
    code = "import os, a.b\nfrom c.d import e\nfrom . import f\nfrom tuneloop.shared import g\ndef h():\n    import i"
    assert imported(ast.parse(code)) == {"a", "c", "i"}


# The lock.


def installed_by_us() -> Iterator[Requirement]:
    """What scripts/install asks for by name."""
    lines = [each for each in PROJECT["dependencies"] if each != "tuneloop-runner"] + RUNNER["dependencies"]
    for extra in ("trainer", "dev"):
        lines += PROJECT["optional-dependencies"][extra]
    for file in ("requirements/engine-cpu.txt", "examples/sums/requirements.txt"):
        lines += [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    yield from map(Requirement, lines)


def locked(python: str) -> dict[str, str]:
    """The versions that the lock has for a release of Python, on Linux."""
    here = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        if line.startswith("#"):
            continue
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate(here):
            assert each.name not in found, f"{each.name} twice for Python {python}"
            [version] = [one.version for one in each.specifier if one.operator == "=="]
            found[canonicalize_name(each.name)] = version
    return found


def test_the_lock_has_what_is_asked_for_in_a_version_that_fits():
    """Changed a requirement? `make lock`."""
    for python in ("3.11", "3.12", "3.13"):
        versions = locked(python) | {"setuptools": "78.1.1"}  # which scripts/install itself names
        unfit = [
            str(wanted)
            for wanted in installed_by_us()
            if not wanted.specifier.contains(versions.get(canonicalize_name(wanted.name), "0"), prereleases=True)
        ]
        assert unfit == [], python


def test_the_lock_names_no_place():
    assert [line for line in LOCK.read_text().splitlines() if re.search(r"[/@]|^-", line)] == []


def test_the_lock_has_the_torch_that_is_installed():
    [torch] = re.findall(r"^TORCH=(.+)$", (ROOT / "scripts" / "install").read_text(), re.MULTILINE)
    assert locked("3.11")["torch"] == torch
