"""`tuneloop raters`: who is listed, and decisions by hand."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import Place
from tests.databases import put_file
from tests.factories import exchange, feedback
from tuneloop.cli.main import app
from tuneloop.shared.errors import UnknownRater
from tuneloop.shared.ledger.ledger import Ledger
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


def raters(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["raters", *arguments], catch_exceptions=True)


def test_raters_are_listed_quarantined_and_released(file: Path, ledger: Ledger) -> None:
    assert raters("-c", str(file)).output == "nobody has given feedback yet\n"
    said = exchange(tenant="default")
    about = {"tenant": "default", "msg_id": said.msg_id}
    ledger.recording.record([said, feedback(**about, source="eve\x1b[2J", value=5.0), feedback(**about)])
    listed = raters("-c", str(file)).output
    assert "(no source) (default): active, 1 events\n" in listed
    assert "\x1b" not in listed
    done = raters("quarantine", "eve\x1b[2J", "-c", str(file), "--reason", "a\nlie")
    assert (done.exit_code, done.output.count("is in quarantine")) == (0, 1)
    assert "quarantined, 1 events" in raters("-c", str(file)).output.splitlines()[0]
    raters("release", "eve\x1b[2J", "-c", str(file), "--reason", "no lie")
    log = raters("-c", str(file), "--log").output.splitlines()
    assert len(log) == 2
    assert log[0].endswith("lie")
    assert log[1].endswith("no lie")
    told = json.loads(raters("-c", str(file), "--log", "--json").output)
    assert [each["reason"] for each in told] == ["a\nlie", "no lie"]
    assert {each["name"] for each in json.loads(raters("-c", str(file), "--json").output)} >= {"eve\x1b[2J"}
    ended = json.loads(raters("release", "eve\x1b[2J", "-c", str(file), "--reason", "no", "--json").output)
    assert ended["state"] == "released"


def test_nobody_of_that_name(file: Path) -> None:
    refused = raters("release", "bob", "-c", str(file), "--reason", "who?")
    assert isinstance(refused.exception, UnknownRater)


def test_a_reason_is_wanted(file: Path) -> None:
    assert raters("quarantine", "bob", "-c", str(file)).exit_code == 2
