"""Builds the wheels of both distributions from copies of their sources, so that no earlier build gets in."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_SOURCES = {
    "tuneloop": ("cli", "explorer", "migrations", "shared", "trainer", "pyproject.toml", "README.md"),
    "tuneloop-runner": ("runner",),
}


def build(distribution: str, folder: Path) -> Path:
    """The wheel of a distribution, built into the folder."""
    with tempfile.TemporaryDirectory() as copy:
        for name in _SOURCES[distribution]:
            _copy(ROOT / name, Path(copy) / name)
        source = Path(copy) / "runner" if distribution == "tuneloop-runner" else Path(copy)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        done = subprocess.run(
            [*command, "--wheel-dir", str(folder), str(source)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob(f"{distribution.replace('-', '_')}-[0-9]*.whl")
    return wheel


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
