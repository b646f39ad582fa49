"""Exactly once, by SIGKILL of every process at random moments under load."""

import sys
from pathlib import Path

import pytest

from tests.loop.harness.kills import run

pytestmark = pytest.mark.contract

ON_BOTH = pytest.mark.parametrize("postgres", [False, pytest.param(True, marks=pytest.mark.postgres)])


def assert_nothing_is_lost_nor_twice(
    folder: Path, *, kills: int, exchanges: int, postgres: bool, policies: bool = False
) -> None:
    report = run(folder, kills=kills, exchanges=exchanges, postgres=postgres, policies=policies)
    assert report.verdict.spotless, report
    sys.stdout.write(f"{report}\n")
    assert len(report.kills) == (6 if postgres else 4)
    assert len(report.moments) == 2
    assert report.exchanges >= exchanges
    assert report.sent_twice
    assert report.corrected
    assert len(report.versions) == 1 + policies, "each policy has learnt"


@ON_BOTH
def test_through_kills_of_every_process_nothing_is_lost_and_nothing_happens_twice(
    tmp_path: Path, postgres: bool
) -> None:
    assert_nothing_is_lost_nor_twice(tmp_path, kills=8, exchanges=100, postgres=postgres)


@ON_BOTH
def test_through_kills_under_two_policies_nothing_is_lost_and_nothing_happens_twice(
    tmp_path: Path, postgres: bool
) -> None:
    assert_nothing_is_lost_nor_twice(tmp_path, kills=8, exchanges=250, postgres=postgres, policies=True)


@pytest.mark.soak
@ON_BOTH
def test_through_hundreds_of_kills_nothing_is_lost_and_nothing_happens_twice(tmp_path: Path, postgres: bool) -> None:
    assert_nothing_is_lost_nor_twice(tmp_path, kills=200, exchanges=4000, postgres=postgres)
