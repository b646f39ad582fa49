"""docs/tune.md, Examples: its commands are commands, its examples are there, and each of them fits on a page."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.worlds.experiment import options_of

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = (ROOT / "docs" / "tune.md").read_text()
NAMES = re.findall(r"^\|\[(\w+)\]\(\.\./examples/\w+/main\.py\)\|", PAGE, re.MULTILINE)
COMMANDS = [shlex.split(line, comments=True)[2:] for line in PAGE.splitlines() if line.startswith("python -m ")]


def test_eight_examples_are_there_and_none_is_longer_than_a_hundred_lines() -> None:
    assert len(NAMES) == 8
    lengths = {name: (ROOT / "examples" / name / "main.py").read_text().count("\n") for name in NAMES}
    assert {name: length for name, length in lengths.items() if length > 100} == {}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_is_one(command: list[str]) -> None:
    module, *arguments = command
    assert find_spec(module)
    if module.endswith(("math_agent.main", "email_search.main", "json_format.main")):
        options_of("an_example", steps=1, rate=1e-4, arguments=arguments)


def workflows() -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    """The async functions with a `model`, of the examples and of the page of tune()."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    texts |= {f"tune.md {n}": each for n, each in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S))}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.AsyncFunctionDef) and any(each.arg == "model" for each in node.args.args):
                yield name, node


def test_a_workflow_that_uses_a_client_says_so() -> None:
    """Where AgentScope is installed too, a `model` without a type is AgentScope's."""
    found = {
        f"{name}: {node.name}": next(each for each in node.args.args if each.arg == "model").annotation
        for name, node in workflows()
        if ".chat.completions" in ast.unparse(node)
    }
    assert len(found) >= 6
    assert {name for name, each in found.items() if each is None or ast.unparse(each) != "AsyncOpenAI"} == set()
