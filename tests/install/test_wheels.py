"""The wheels: one top-level name, and all that is needed below it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.install.wheels import ROOT

PACKAGES = ("cli", "explorer", "migrations", "runner", "shared", "trainer")


@pytest.fixture(scope="session")
def contents(wheels: dict[str, Path]) -> dict[str, list[str]]:
    """The files that each distribution's wheel installs."""
    return {name: zipfile.ZipFile(wheel).namelist() for name, wheel in wheels.items()}


@pytest.mark.parametrize("distribution", ["tuneloop", "tuneloop-runner"])
def test_the_one_name_that_is_added_is_ours(contents: dict[str, list[str]], distribution: str) -> None:
    top = {name.partition("/")[0] for name in contents[distribution]}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tuneloop"}
    assert "tuneloop/__init__.py" not in contents[distribution]


def test_no_file_is_in_both(contents: dict[str, list[str]]) -> None:
    one, other = (set(names) for names in contents.values())
    assert one & other == set()


def test_all_modules_and_data_are_in_them(contents: dict[str, list[str]]) -> None:
    modules = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "build" not in file.parts]
    ui = ROOT / "explorer" / "ui"
    sql = (ROOT / "migrations").rglob("*.sql")
    data = [*(ROOT / "migrations").glob("*.mako"), *sql, ROOT / "runner" / "py.typed"]
    data += [*(ui / "static").iterdir(), *(ui / "templates").iterdir()]
    wanted = {f"tuneloop/{file.relative_to(ROOT)}" for file in modules + data}
    assert any(name.startswith("tuneloop/migrations/versions/0") for name in wanted)
    installed = {name for names in contents.values() for name in names if ".dist-info/" not in name}
    assert installed == wanted


def test_both_are_imported_below_the_one_name(installed: Path) -> None:
    code = (
        "import tuneloop.runner as r, tuneloop.shared as s, tuneloop.migrations.versions as v; "
        "import tuneloop; print(r.__file__, s.__file__, *v.__path__, tuneloop.__file__)"
    )
    command, environment = [sys.executable, "-P", "-c", code], {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *files, of_the_name = done.stdout.split()
    assert of_the_name == "None"
    assert all(Path(file).is_relative_to(installed) for file in files), files
