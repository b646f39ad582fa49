"""How far the trainer lags, from what it notes."""

from pathlib import Path

import pytest

from tuneloop.shared.capacity.pace import WINDOW_S, VersionPace, find_pace, note_version


def note(folder: Path, at: float, **but: float) -> None:
    figures = {"consumed": 30, "waiting": 0, "set_aside": 0, "step_s": 1.0, "publish_s": 7.0} | but
    note_version(folder, VersionPace(at=at, **figures))  # type: ignore[arg-type]


def test_the_factor_and_the_cure_are_a_sentence(tmp_path: Path) -> None:
    for at in range(5):
        note(tmp_path, 1000.0 + 10 * at, set_aside=280)
    pace = find_pace(tmp_path, 1050.0)
    assert pace is not None
    assert pace.sentence == (
        "31 replies a second are committed, 3 trained: the trainer lags 10 times behind;"
        " publishing takes 70% of its time: raise trainer.save_interval"
    )


@pytest.mark.parametrize(
    ("spent", "cure"),
    [
        ({"step_s": 8.0, "publish_s": 1.0}, "steps take 80% of its time: more or faster GPUs"),
        ({"step_s": 1.0, "publish_s": 1.0}, "80% of its time is neither steps nor publishing"),
    ],
)
def test_what_takes_the_most_time_is_what_is_mended(tmp_path: Path, spent: dict[str, float], cure: str) -> None:
    for at in range(3):
        note(tmp_path, 10.0 * at, set_aside=100, **spent)
    pace = find_pace(tmp_path, 20.0)
    assert pace is not None
    assert cure in pace.sentence


def test_only_the_last_minutes_count_and_no_pace_is_told_of_a_trainer_that_stopped(tmp_path: Path) -> None:
    for at, set_aside in ((0.0, 0), (10.0, 9999), (10.0 + WINDOW_S, 0), (20.0 + WINDOW_S, 0)):
        note(tmp_path, at, set_aside=set_aside)
    pace = find_pace(tmp_path, 20.0 + WINDOW_S)
    assert pace is not None
    assert pace.lag == 1
    assert find_pace(tmp_path, 21.0 + 2 * WINDOW_S) is None


@pytest.mark.parametrize("content", [None, b"", b"[{}]"])
def test_without_figures_there_is_no_pace(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "monitor").mkdir()
        (tmp_path / "monitor" / "pace.json").write_bytes(content)
    assert find_pace(tmp_path, 0.0) is None
    note(tmp_path, 0.0)
    assert find_pace(tmp_path, 0.0) is None
