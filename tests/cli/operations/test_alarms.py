"""`tuneloop alarms`: what is open, and clearing it."""

import pytest
from typer.testing import CliRunner

from tests.cli.operations.conftest import Run
from tuneloop.cli.main import app
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.ledger.ledger import Alarm, Ledger


def test_open_alarms_are_listed(run: Run, ledger: Ledger) -> None:
    assert run("alarms").output == "no alarm is open\n"
    ledger.alarms.raise_alarm(
        Alarm("length", "replies got long", step=3, version=2, value=1.5, threshold=1.0, holds=True)
    )
    ledger.alarms.raise_alarm(Alarm("entropy", "it fell"))
    lines = run("alarms").output.splitlines()
    assert lines[0].startswith("length: raised 2")
    assert lines[0].endswith("UTC, open, no new version is served")
    assert lines[1:3] == ["  replies got long", "  step 3, version 2, value 1.5, threshold 1"]
    assert lines[3].startswith("entropy: raised")
    assert lines[3].endswith("open")
    assert lines[4:] == ["  it fell"]


def test_one_is_cleared_by_its_name(run: Run, ledger: Ledger) -> None:
    for name in ("length", "entropy"):
        ledger.alarms.raise_alarm(Alarm(name, "drifted", holds=True))
    told = run("alarms", "clear", "length")
    assert (told.exit_code, told.output) == (0, "length is cleared; another alarm still holds new versions back\n")
    with pytest.raises(TuneloopError, match="no alarm length is open; open are: entropy"):
        run("alarms", "clear", "length")
    assert run("alarms", "clear", "entropy").output == "entropy is cleared\n"
    assert not ledger.alarms.promotion_held()
    assert run("alarms", "--all").output.count(", cleared 2") == 2


def test_without_settings_it_says_what_is_missing() -> None:
    told = CliRunner().invoke(app, ["alarms"])
    assert told.exit_code == 2
    assert "--config" in told.output
