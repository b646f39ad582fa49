"""A working folder that is full of Python files of somebody else's."""

from pathlib import Path
from typing import NamedTuple

import pytest

#: Names of our folders, of our import name, and of modules that everything imports.
PACKAGES = ("cli", "explorer", "migrations", "runner", "shared", "trainer", "tuneloop")
MODULES = ("http", "logging", "types")

_RAISING = """
with open({witness!r}, "a") as file:
    file.write({name!r} + "\\n")
raise SystemExit("imported from the working folder: " + {name!r})
"""


class Foreign(NamedTuple):
    """A working folder whose packages and modules must not be imported, and the list of those that were."""

    folder: Path
    witness: Path

    def imported(self) -> list[str]:
        return self.witness.read_text().splitlines() if self.witness.exists() else []


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    folder, witness = tmp_path / "of-theirs", tmp_path / "imported"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(_RAISING.format(witness=str(witness), name=name))
    for name in MODULES:
        (folder / f"{name}.py").write_text(_RAISING.format(witness=str(witness), name=name))
    return Foreign(folder, witness)
