"""Budgets: what fits on a page is read, what does not is scrolled past."""

import ast
import statistics
import subprocess
import sys

from sources import PACKAGES, ROOT, SOURCES, Function, classes, functions, lines

FILE, CLASS, FUNCTION, PARAMETERS, POSITIONAL, COMPLEXITY = 400, 200, 60, 6, 4, 10
MEDIAN_FILE, MEDIAN_FUNCTION = 200, 9


def parameters(function: Function) -> list[ast.arg]:
    names = function.args
    return [each for each in names.posonlyargs + names.args + names.kwonlyargs if each.arg not in {"self", "cls"}]


def test_no_file_is_longer_than_400_lines():
    sizes = {str(source.path): source.text.count("\n") for source in SOURCES}
    assert {path: size for path, size in sizes.items() if size > FILE} == {}


def test_no_class_is_longer_than_200_lines():
    assert {f"{source.path}: {node.name}": lines(node) for source, node in classes() if lines(node) > CLASS} == {}


def test_no_function_reaches_60_lines():
    found = {f"{source.path}: {node.name}": lines(node) for source, node in functions() if lines(node) >= FUNCTION}
    assert found == {}


def test_half_of_the_functions_are_9_lines_or_fewer():
    assert statistics.median(lines(node) for _, node in functions()) <= MEDIAN_FUNCTION


def test_half_of_the_files_are_200_lines_or_fewer():
    assert statistics.median(source.text.count("\n") for source in SOURCES) <= MEDIAN_FILE


def test_no_function_takes_more_than_6_parameters():
    """But for tune(): the first of its keywords are AgentScope's, the others the options that users see of it."""
    found = {f"{source.path}: {node.name}": len(parameters(node)) for source, node in functions()}
    found.pop("runner/tuning/tune.py: tune")
    assert {name: count for name, count in found.items() if count > PARAMETERS} == {}


def test_no_function_is_more_complex_than_10():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--no-cache", "--output-format"]
    limit = ["concise", "--config", f"lint.mccabe.max-complexity={COMPLEXITY}", *PACKAGES]
    ruff = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ruff.returncode == 0, ruff.stdout


def test_no_rule_is_switched_off_for_a_whole_file():
    switches = ("ruff: noqa", "flake8: noqa", "mypy: ignore-errors", "mypy: disable-error-code")
    assert [source.path for source in SOURCES if any(switch in source.text for switch in switches)] == []
