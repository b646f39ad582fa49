"""What is collected is the same in every process: pytest-xdist ends the whole run when two workers find other tests.

What is slow is there, and is not most of what there is.
"""

import ast
from pathlib import Path

from tests.order import is_slow, slow_names

TESTS = Path(__file__).parent.parent
CHANGING = {"time", "datetime", "random", "secrets", "uuid", "urandom", "getpid", "mkdtemp", "formatdate"}


def changing(text: str) -> list[str]:
    """Return what the parameters of `text`'s tests call that answers otherwise in another process."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    parameters = [call for call in calls if ast.unparse(call.func).endswith("parametrize")]
    inner = [call for outer in parameters for call in ast.walk(outer) if isinstance(call, ast.Call)]
    return [ast.unparse(call) for call in inner if CHANGING & set(ast.unparse(call.func).split("."))]


def test_no_parameter_of_a_test_is_the_time_or_drawn():
    found = {str(path.relative_to(TESTS)): changing(path.read_text()) for path in TESTS.rglob("test_*.py")}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_a_parameter_that_is_the_time_is_found():
    assert changing('@pytest.mark.parametrize("said", ["1", time.time() + 1])\ndef test(said): ...') == ["time.time()"]


def functions(file: Path) -> set[str]:
    """Return the tests of a file as slow.txt names them."""
    path = f"tests/{file.relative_to(TESTS)}"
    found = set()
    for node in ast.parse(file.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{path}::{node.name}::" if isinstance(node, ast.ClassDef) else f"{path}::"
        found |= {prefix + each.name for each in inner if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in found if "::test_" in name}


def test_each_slow_test_is_there_and_few_files_have_nothing_else():
    by_file = {f"tests/{file.relative_to(TESTS)}": functions(file) for file in TESTS.rglob("test_*.py")}
    assert slow_names() <= by_file.keys() | set().union(*by_file.values())
    assert len([file for file, found in by_file.items() if found and all(map(is_slow, found))]) < len(by_file) / 10


def test_a_function_is_slow_with_all_its_parameters_and_a_file_with_all_its_functions():
    function = next(name for name in slow_names() if "::" in name and not is_slow(name.partition("::")[0]))
    assert is_slow(f"{function}[one-two]")
    assert not is_slow(f"{function}_else[one]")
    assert is_slow("tests/loop/test_outage.py::test_of_any_name")
    assert not is_slow("tests/loop/test_loop.py::test_of_any_name")
