"""The measurement that tests/order.py is kept right by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs


def test_what_a_test_costs_includes_the_processes_that_it_starts(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    source = f"import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, '-c', {burn!r}], check=True)\n"
    (tmp_path / "test_child.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.costs", "--costs", "lines", "test_child.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(costs.__file__).parents[1])}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    line = json.loads((tmp_path / "lines").read_text())
    assert (line["test"], line["group"]) == ("test_child.py::test_it", "test_child")
    assert line["cpu"] >= 0.45
    assert line["wall"] >= 0.45


def test_groups_are_added_up_and_the_longest_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines"
    lines = [("a", 30, 1), ("b", 25, 2), ("b", 25, 3), ("short", 1, 1)]
    file.write_text("".join(json.dumps({"group": name, "wall": wall, "cpu": cpu}) + "\n" for name, wall, cpu in lines))
    costs.main([str(file)])
    printed = capsys.readouterr()
    assert printed.out == '    "b": 50,  # 5 of processors\n    "a": 30,  # 1 of processors\n'
    assert printed.err == "in all 81 s, 7 s of processors\n"
