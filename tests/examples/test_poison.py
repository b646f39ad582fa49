"""That hostile raters do not spoil the model: one short way of benchmarks/learning/poison.py."""

from pathlib import Path

import pytest

from benchmarks.learning.poison import Trial, learn
from examples.tasks.start import start

SAMPLES = 512


@pytest.mark.soak
@pytest.mark.parametrize("attack", ["extreme", "everything"])
def test_hostile_raters_cost_next_to_nothing(tmp_path: Path, attack: str) -> None:
    starts = start(tmp_path, "sums", 0)
    honest, hostile = (learn(Trial(each, 0, SAMPLES, "on"), starts) for each in ("honest", attack))
    assert honest["after"] > honest["before"] + 0.3, "else it would show nothing"
    assert hostile["after"] > honest["after"] - 0.05
    assert (hostile["trained"], hostile["dropped"]) == (honest["trained"], 0)
