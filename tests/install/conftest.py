"""What users install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.foreign import foreign as foreign
from tests.install.wheels import build


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both distributions' wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    return {name: build(name, folder) for name in ("tuneloop", "tuneloop-runner")}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """A folder with both distributions, as their wheels are."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, *map(str, wheels.values())], check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture
def environment(installed: Path) -> dict[str, str]:
    """An environment in which `tuneloop` is what was installed, before this checkout."""
    return os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
