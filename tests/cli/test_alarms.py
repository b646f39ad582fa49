"""`tuneloop alarms`: what is open, and clearing it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import Place
from tests.databases import put_file
from tuneloop.cli.main import app
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.ledger.ledger import Alarm, Ledger
from tuneloop.shared.settings.loader import load_settings


@pytest.fixture
def file(tmp_path: Path, sqlite_place: Place) -> Path:
    """Settings of an experiment whose database is there."""
    put_file(sqlite_place.url, "migrated")
    values = {
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "some/model"},
        "buffer": {"trainer_input": {"experience_buffer": {"path": sqlite_place.url}}},
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def ledger(file: Path) -> Iterator[Ledger]:
    ledger = Ledger.of(load_settings(file))
    yield ledger
    ledger.close()


def alarms(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["alarms", *arguments], catch_exceptions=True)


def test_open_alarms_are_listed(file: Path, ledger: Ledger) -> None:
    assert alarms("-c", str(file)).output == "no alarm is open\n"
    ledger.alarms.raise_alarm(
        Alarm("length", "replies got long", step=3, version=2, value=1.5, threshold=1.0, holds=True)
    )
    ledger.alarms.raise_alarm(Alarm("entropy", "it fell"))
    lines = alarms("-c", str(file)).output.splitlines()
    assert lines[0].startswith("length: raised 2")
    assert lines[0].endswith("UTC, open, no new version is served")
    assert lines[1:3] == ["  replies got long", "  step 3, version 2, value 1.5, threshold 1"]
    assert lines[3].startswith("entropy: raised")
    assert lines[3].endswith("open")
    assert lines[4:] == ["  it fell"]


def test_one_is_cleared_by_its_name(file: Path, ledger: Ledger) -> None:
    for name in ("length", "entropy"):
        ledger.alarms.raise_alarm(Alarm(name, "drifted", holds=True))
    told = alarms("clear", "length", "-c", str(file))
    assert (told.exit_code, told.output) == (0, "length is cleared; another alarm still holds new versions back\n")
    assert [each.name for each in ledger.alarms.all()] == ["entropy"]
    assert alarms("clear", "entropy", "-c", str(file)).output == "entropy is cleared\n"
    assert not ledger.alarms.promotion_held()
    every = alarms("-c", str(file), "--all").output
    assert every.count(", cleared 2") == 2


def test_one_that_is_not_open_is_an_error_that_names_those_that_are(file: Path, ledger: Ledger) -> None:
    ledger.alarms.raise_alarm(Alarm("entropy", "drifted"))
    told = alarms("clear", "length", "-c", str(file))
    assert told.exit_code == 1
    assert isinstance(told.exception, TuneloopError)
    assert str(told.exception) == "no alarm length is open; open are: entropy"


def test_without_settings_it_says_what_is_missing() -> None:
    told = alarms()
    assert told.exit_code == 2
    assert "--config" in told.output
