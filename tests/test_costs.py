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
    keys = ("test", "group", "wall", "cpu")
    written = [dict(zip(keys, (f"{name}.py::test", name, wall, cpu), strict=True)) for name, wall, cpu in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in written))
    costs.main([str(file)])
    printed = capsys.readouterr()
    assert printed.out == '    "b": 50,  # 5 of processors\n    "a": 30,  # 1 of processors\n'
    assert printed.err == "in all 81 s, 7 s of processors\n"


def test_what_a_file_shares_is_of_all_its_tests_and_one_that_costs_little_stays() -> None:
    def of(test: str, wall: float) -> costs.Cost:
        return costs.Cost(test, "", wall, 0.0)

    server = [of("a.py::test_first", 10.0), *(of(f"a.py::test_other[{n}]", 0.1) for n in range(40))]
    long = [of("b.py::test_long", 9.0), of("b.py::test_longer", 20.0), of("b.py::test_short", 0.2)]
    rest = [of("c.py::test_cheapest", 4.0), of("c.py::test_long", 12.0), of("d.py::test_long", 50.0)]
    kept = [of(f"{costs.NEVER_SLOW[0]}::test_long", 80.0)]
    slow = ["b.py::test_long", "b.py::test_longer", "c.py::test_long", "d.py"]
    assert list(costs.slow_tests([*server, *long, *rest, *kept])) == slow
