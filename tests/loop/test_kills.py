"""Exactly once, by SIGKILL at random moments under load."""

from pathlib import Path

from tests.loop.kills import run


def test_through_a_dozen_kills_nothing_is_lost_and_nothing_is_trained_on_twice(tmp_path: Path) -> None:
    report = run(tmp_path, kills=12)
    assert report.exchanges > 200
    assert (report.exchanges_lost, report.feedbacks_lost, report.rewards_wrong) == (0, 0, 0)
    assert (report.imbalance, report.steps_not_accounted_for) == ((), 0)
