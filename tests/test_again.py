"""Tests that failed in a whole run are run again alone: few, none that holds a promise about crashes, each named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_HOUSE = Path(__file__).parents[1]

#: No plugin but the one that is asked for: those that are installed take seconds to load. Nor what says to the runs
#: in here that they were started by a worker.
_PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
_PLAIN["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

#: Fails where another test runs beside it, as one does that measures time.
_BUSY = """
import os, pathlib
def test_busy():
    assert "PYTEST_XDIST_WORKER" not in os.environ
def test_quiet():
    pass
"""


def again(project: Path, tests: dict[str, str], *flags: str) -> "subprocess.CompletedProcess[str]":
    """A whole run of such tests by two workers, and what failed there once more."""
    for name in ("scripts/again", *tests):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(_HOUSE / "scripts/again", project / "scripts/again")
    hook = (_HOUSE / "tests/conftest.py").read_text()
    hook = "import pytest\n" + hook[hook.index("def pytest_sessionfinish") :]
    (project / "conftest.py").write_text(hook + _GROUPS)
    (project / "pytest.ini").write_text("[pytest]\n")
    for name, source in tests.items():
        (project / name).write_text(source)
    whole = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist", "loadgroup", *flags]
    assert subprocess.run(whole, cwd=project, env=_PLAIN, capture_output=True).returncode
    return subprocess.run([sys.executable, "scripts/again"], cwd=project, env=_PLAIN, capture_output=True, text=True)


_GROUPS = """

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
"""


def test_what_passes_alone_is_named(tmp_path: Path) -> None:
    ended = again(tmp_path, {"tests/test_a.py": _BUSY})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "PASSED ONLY ALONE, to be mended:\n  tests/test_a.py::test_busy\n" in ended.stdout
    assert "again: tests/test_a.py::test_busy@" in ended.stdout
    assert "PYTEST_XDIST_WORKER" in ended.stdout.partition("PASSED ONLY")[0], "how it had ended"
    assert "1 passed" in ended.stdout


@pytest.mark.parametrize(
    ("tests", "flags", "why"),
    [
        ({"tests/test_a.py": "def test_wrong():\n    assert False\n"}, (), "failed alone, too"),
        ({f"tests/test_{number}.py": _BUSY for number in range(4)}, (), "4 tests failed; at most 3"),
        ({"tests/loop/test_kills.py": _BUSY}, (), "not run again: tests/loop/test_kills.py::test_busy"),
        ({f"tests/test_{number}.py": _BUSY for number in range(2)}, ("-x",), "did not come to its end"),
    ],
)
def test_what_is_no_chance_stays_a_failure(
    tmp_path: Path, tests: dict[str, str], flags: tuple[str, ...], why: str
) -> None:
    ended = again(tmp_path, tests, *flags)
    assert ended.returncode == 1
    assert why in ended.stderr


def test_a_run_that_left_nothing_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(_HOUSE / "scripts/again", tmp_path / "scripts/again")
    assert (
        subprocess.run([sys.executable, tmp_path / "scripts/again"], check=False, capture_output=True).returncode == 1
    )


@pytest.mark.contract
def test_a_run_without_pytests_cache_ends_as_its_tests_do(tmp_path: Path) -> None:
    hook = (_HOUSE / "tests/conftest.py").read_text()
    (tmp_path / "conftest.py").write_text("import pytest\n" + hook[hook.index("def pytest_sessionfinish") :])
    (tmp_path / "test_a.py").write_text("def test_well():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=tmp_path, env=_PLAIN, capture_output=True, text=True)
    assert (ended.returncode, "1 passed" in ended.stdout) == (0, True), ended.stdout + ended.stderr
