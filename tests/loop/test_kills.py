"""Exactly once, by SIGKILL of every process at random moments under load."""

from pathlib import Path

import pytest

from tests.loop.harness.kills import run


@pytest.mark.parametrize("postgres", [False, pytest.param(True, marks=pytest.mark.postgres)])
def test_through_kills_of_every_process_nothing_is_lost_and_nothing_happens_twice(
    tmp_path: Path, postgres: bool
) -> None:
    report = run(tmp_path, kills=10, exchanges=200, postgres=postgres)
    assert report.verdict.spotless, report
    assert len(report.kills) == (5 if postgres else 3)
    assert report.exchanges >= 200
    assert report.sent_twice
    assert report.corrected
    assert report.versions
