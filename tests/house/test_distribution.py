"""What is installed: every package of ours, below one import name."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import setuptools_scm
from packaging.requirements import Requirement
from sources import PACKAGES, ROOT

#: The version of files without git.
FALLBACK = "0.1.0"


def setuptools_of(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def packages_below(*folders: str) -> set[str]:
    """Every folder with Python files, by its import name."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py") if "build" not in file.parts)
    return {".".join(("tuneloop", *file.parent.relative_to(ROOT).parts)) for file in files}


def test_every_package_is_installed() -> None:
    assert set(setuptools_of(ROOT)["packages"]) == packages_below(*(each for each in PACKAGES if each != "runner"))
    assert set(setuptools_of(ROOT / "runner")["packages"]) == packages_below("runner")


def test_every_package_has_its_folder() -> None:
    assert setuptools_of(ROOT)["package-dir"] == {f"tuneloop.{each}": each for each in PACKAGES if each != "runner"}
    assert setuptools_of(ROOT / "runner")["package-dir"] == {"tuneloop.runner": "."}


def test_the_name_itself_is_no_package_of_ours() -> None:
    """With a `tuneloop/__init__.py` in one distribution, the other's packages could not be imported."""
    assert not (ROOT / "tuneloop").exists()
    assert "tuneloop" not in setuptools_of(ROOT)["packages"] + setuptools_of(ROOT / "runner")["packages"]


def test_an_installation_leaves_the_clone_clean() -> None:
    left = ["build/x", "runner/build/x", "runner/x.egg-info/x"]
    ignored = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", *left], capture_output=True, text=True, check=True
    )
    assert ignored.stdout.split() == left


def test_an_extra_installs_the_agentscope_that_is_tested() -> None:
    """What AgentScope 1.x leaves out of its own requirements is in ours, with versions that it works with."""
    extra = tomllib.loads((ROOT / "runner/pyproject.toml").read_text())["project"]["optional-dependencies"][
        "agentscope1"
    ]
    pinned = (ROOT / "tests/clients/agentscope1.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in pinned if "==" in line)
    wanted = {each.name: each for each in map(Requirement, extra)}
    assert wanted.keys() == {"agentscope", "mcp", "openai", "sqlalchemy", "tqdm"}
    assert all(each.specifier.contains(tested[name]) for name, each in wanted.items())
    assert [wanted[name].specifier.contains("3.0") for name in ("agentscope", "mcp", "openai")] == [False] * 3
    assert wanted["sqlalchemy"].extras == {"asyncio"}


def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    """Of a checkout with a tag; of one without, its commits; of files without git, the same fallback everywhere."""
    for folder in (ROOT, ROOT / "runner"):
        table = tomllib.loads((folder / "pyproject.toml").read_text())
        assert "version" in table["project"]["dynamic"]
        assert table["tool"]["setuptools_scm"]["fallback_version"] == FALLBACK
    assert setuptools_scm.get_version(root=str(tmp_path), fallback_version=FALLBACK) == FALLBACK
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["commit", "-qm", "c", "--allow-empty"]):
        subprocess.run([*git, *command], check=True)
    assert setuptools_scm.get_version(root=str(tmp_path)).startswith("0.1.dev1+g")
    subprocess.run([*git, "tag", "v1.2.3"], check=True)
    assert setuptools_scm.get_version(root=str(tmp_path)) == "1.2.3"
