"""What each test costs, by the clock and of processors: `pytest -p tests.costs --costs FILE` writes a line for each.

`python -m tests.costs FILE` adds them up by group, as tests/order.py has them; `python -m tests.costs --slow FILE` says
which tests are slow, as tests/slow.txt has them. The processor time is that of the test's process and of all processes
below it, so that of an engine or a server is told where it was spent.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest

LEAST = 20
"""Seconds: groups that take fewer need no place of their own in tests/order.py."""

SLOW_S, WHOLE_S = 0.75, 5.0
"""Seconds by the clock, of three tests at once on two cores, from which on one is slow; the first of a file that would
have no other may take longer."""

NEVER_SLOW = ("tests/loop/test_loop.py", "tests/loop/test_kills.py", "tests/runner/feedback/test_kills.py")
"""What the project is for: the whole road with real vLLM, PostgreSQL and trainer; no kill loses what was taken."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """Seconds up to now."""

    wall: float
    cpu: float


class Cost(NamedTuple):
    """Seconds that a test took, by the clock and of processors."""

    test: str
    group: str
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
                "test": item.nodeid.removesuffix(f"@{name}"),  # pytest-xdist adds it
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


def groups_of(costs: Sequence[Cost]) -> Iterator[str]:
    """A line of tests/order.py for each group that takes long, the longest first."""
    walls: dict[str, float] = defaultdict(float)
    cpus: dict[str, float] = defaultdict(float)
    for cost in costs:
        walls[cost.group] += cost.wall
        cpus[cost.group] += cost.cpu
    for group in sorted(walls, key=lambda each: -walls[each]):
        if walls[group] >= LEAST:
            yield f'    "{group}": {walls[group]:.0f},  # {cpus[group]:.0f} of processors'


def slow_tests(costs: Sequence[Cost]) -> Iterator[str]:
    """The functions whose tests are slow, in the order of their names; a file that has no others is named alone.

    What a file's first test takes longer than the median is taken for what they share, and each has its part of it.
    """
    by_file: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        by_file[cost.test.partition("::")[0]].append(cost)
    for file, found in sorted(by_file.items()):
        if file in NEVER_SLOW:
            continue
        shared = max(0.0, found[0].wall - median(each.wall for each in found)) if len(found) > 1 else 0.0
        of_function: dict[str, list[float]] = defaultdict(list)
        for number, cost in enumerate(found):
            own = cost.wall - (0.0 if number else shared)
            of_function[cost.test.partition("[")[0]].append(own + shared / len(found))
        means = {function: fmean(each) for function, each in of_function.items()}
        slow = {function for function, mean in means.items() if mean >= SLOW_S}
        first = min(means, key=lambda each: sum(of_function[each]))
        if slow == means.keys() and sum(of_function[first]) < WHOLE_S:
            slow.remove(first)
        yield from [file] if slow == means.keys() else sorted(slow)


def main(arguments: list[str]) -> None:
    """Print the groups, the longest first, or the tests that are slow."""
    files = [each for each in arguments if each != "--slow"]
    costs = [Cost(**json.loads(line)) for file in files for line in Path(file).read_text().splitlines()]
    for line in slow_tests(costs) if "--slow" in arguments else groups_of(costs):
        sys.stdout.write(f"{line}\n")
    wall, cpu = (sum(getattr(cost, of) for cost in costs) for of in ("wall", "cpu"))
    sys.stderr.write(f"in all {wall:.0f} s, {cpu:.0f} s of processors\n")


if __name__ == "__main__":
    main(sys.argv[1:])
