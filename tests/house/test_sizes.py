"""Budgets: what fits on a page is read, what does not is scrolled past."""

import subprocess
import sys

from sources import PACKAGES, ROOT, SOURCES, classes, functions, lines

FILE, CLASS, FUNCTION, COMPLEXITY = 600, 300, 90, 12


def test_no_file_is_longer_than_600_lines():
    sizes = {str(source.path): source.text.count("\n") for source in SOURCES}
    assert {path: size for path, size in sizes.items() if size > FILE} == {}


def test_no_class_is_longer_than_300_lines():
    assert {f"{source.path}: {node.name}": lines(node) for source, node in classes() if lines(node) > CLASS} == {}


def test_no_function_reaches_90_lines():
    found = {f"{source.path}: {node.name}": lines(node) for source, node in functions() if lines(node) >= FUNCTION}
    assert found == {}


def test_no_function_is_more_complex_than_12():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--no-cache", "--output-format"]
    limit = ["concise", "--config", f"lint.mccabe.max-complexity={COMPLEXITY}", *PACKAGES]
    ruff = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ruff.returncode == 0, ruff.stdout


def test_no_rule_is_switched_off_for_a_whole_file():
    switches = ("ruff: noqa", "flake8: noqa", "mypy: ignore-errors", "mypy: disable-error-code")
    assert [source.path for source in SOURCES if any(switch in source.text for switch in switches)] == []
