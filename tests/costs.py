"""What each test costs, by the clock and of processors: `pytest -p tests.costs --costs FILE` writes a line for each.

`python -m tests.costs FILE` adds them up by group, as tests/order.py has them. The processor time is that of the test's
process and of all processes below it, so that of an engine or a server is told where it was spent.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

LEAST = 20
"""Seconds: groups that take fewer need no place of their own in tests/order.py."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """Seconds up to now."""

    wall: float
    cpu: float


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", help="the file to which a line for each test is added")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The whole of a test: fixtures that it is the first to use or the last, too."""
    before = _now()
    try:
        return (yield)
    finally:
        after = _now()
        file = item.config.getoption("costs")
        if file is not None:
            group = item.get_closest_marker("xdist_group")
            name = (group.args[0] if group.args else group.kwargs["name"]) if group else str(item.path)
            line = {
                "test": item.nodeid,
                "group": Path(name).stem,
                "wall": round(after.wall - before.wall, 3),
                "cpu": round(after.cpu - before.cpu, 2),
            }
            with Path(file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def _now() -> Moment:
    """The time of who has ended is told by the parent, of who has not by /proc."""
    return Moment(time.monotonic(), sum(_ticks_below(os.getpid())) / _TICKS)


def _ticks_below(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended since
        pid = int(place.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(ticks.get(pid, 0))
        left += children[pid]
    return found


def main(files: list[str]) -> None:
    """Print the groups, the longest first."""
    walls: dict[str, float] = defaultdict(float)
    cpus: dict[str, float] = defaultdict(float)
    for line in (json.loads(each) for file in files for each in Path(file).read_text().splitlines()):
        walls[line["group"]] += line["wall"]
        cpus[line["group"]] += line["cpu"]
    for group in sorted(walls, key=lambda each: -walls[each]):
        if walls[group] >= LEAST:
            sys.stdout.write(f'    "{group}": {walls[group]:.0f},  # {cpus[group]:.0f} of processors\n')
    sys.stderr.write(f"in all {sum(walls.values()):.0f} s, {sum(cpus.values()):.0f} s of processors\n")


if __name__ == "__main__":
    main(sys.argv[1:])
