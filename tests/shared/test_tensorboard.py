"""Curves: TensorBoard reads them, and no disk that is full, or folder that is none, stops who writes them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tuneloop.shared.tensorboard import Curves

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def shown(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return [(each.step, each.value) for each in reader.Scalars(name)] if name in reader.Tags()["scalars"] else []


def test_tensorboard_shows_what_was_written_at_once(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "run")
    assert curves.add(0, {"a/b": 0.5, "c": -2.0})
    assert curves.add(300, {"a/b": 1.5})
    assert shown(tmp_path / "run", "a/b") == [(0, 0.5), (300, 1.5)]
    assert shown(tmp_path / "run", "c") == [(0, -2.0)]


def test_who_goes_on_after_a_step_purges_what_came_later(tmp_path: Path) -> None:
    before = Curves(tmp_path, after=0)
    for step in range(1, 6):
        before.add(step, {"a": float(step)})
    after = Curves(tmp_path, after=3)
    assert shown(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    after.add(4, {"a": 40.0})
    assert shown(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


FULL = """
import resource, sys
from pathlib import Path
from tuneloop.shared.tensorboard import Curves

curves = Curves(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
written = [step for step in range(100) if curves.add(step, {"some/name": float(step)})]
assert 0 < len(written) < 50, written
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert curves.add(100, {"some/name": 100.0})
print(*written)
"""


def test_a_full_disk_costs_the_points_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("curves_not_written") + done.stderr.count("curves_not_written") == 1
    written = [int(each) for each in done.stdout.splitlines()[-1].split()]
    assert shown(tmp_path, "some/name") == [(step, float(step)) for step in [*written, 100]]
