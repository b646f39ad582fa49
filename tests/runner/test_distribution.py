"""The runner's own distribution: it installs below one name, needs httpx alone, and documents what works."""

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.install.wheels import ROOT, build

HEAVY = ("torch", "numpy", "pydantic", "sqlalchemy", "msgspec", "structlog", "tuneloop.shared")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("tuneloop-runner", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that runs Python where nothing but the wheel, httpx and what httpx needs can be imported."""
    folder = tmp_path_factory.mktemp("bare")
    zipfile.ZipFile(wheel).extractall(folder)
    for name in _with_requirements("httpx"):
        files = distribution(name).files or []
        for top in {each.parts[0] for each in files if each.parts[0] not in {"..", "__pycache__"}}:
            (folder / top).symlink_to(distribution(name).locate_file(top))
    return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(folder)!r}); exec(sys.argv[1])"]


def _with_requirements(name: str) -> set[str]:
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            needed = map(Requirement, distribution(one).requires or [])
            waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def test_the_wheel_installs_one_top_level_name(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tuneloop"}


def test_httpx_is_all_that_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    needed = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    assert [each.name for each in map(Requirement, needed) if each.marker is None] == ["httpx"]


def test_it_is_imported_where_nothing_else_is_installed(bare: list[str]) -> None:
    code = "import tuneloop.runner, tuneloop.runner.rewards.components; print(*sys.modules)"
    done = subprocess.run([*bare, code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"tuneloop.runner", "tuneloop.runner.judging.judge", "httpx"} <= loaded
    assert not loaded & set(HEAVY)


def test_the_example_of_its_readme_runs(bare: list[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "runner" / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([*bare, code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
