"""What is collected is the same in every process: pytest-xdist ends the whole run when two workers find other tests."""

import ast
from pathlib import Path

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
