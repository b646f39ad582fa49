import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.databases import put_file
from tests.factories import exchange, experience, feedback
from tuneloop.cli.main import app
from tuneloop.shared import quarantine
from tuneloop.shared.errors import TuneloopError
from tuneloop.shared.experience import Exchange, State, encode
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TUNELOOP__")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    values = {"checkpoint_root_dir": str(tmp_path), "model": {"model_path": "some/model"}}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def settings(file: Path) -> Settings:
    return Settings.model_validate(yaml.safe_load(file.read_text()))


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    put_file(settings.database_url, "migrated")
    ledger = Ledger.of(settings)
    yield ledger
    ledger.close()


@pytest.fixture
def said(settings: Settings) -> list[Exchange]:
    """An exchange and its feedback in one slot, and in another one that the database refuses, and no record at all."""
    slots = [settings.spool_dir / name for name in ("0", "1")]
    said = [exchange(), exchange(experiences=(experience(logprobs=b"\0\0"),))]
    for slot in slots:
        slot.mkdir(parents=True)
    for payload in (encode(said[0]), encode(feedback(msg_id=said[0].msg_id))):
        quarantine.set_aside(slots[0], payload)
    for payload in (b"nonsense", encode(said[1])):
        quarantine.set_aside(slots[1], payload)
    return said


def ran(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def names(file: Path) -> list[str]:
    return [line.split()[0] for line in ran("spool", "list", "-c", file).stdout.splitlines()]


def test_what_is_in_quarantine_is_listed_without_its_text(file: Path, said: list[Exchange]) -> None:
    lines = ran("spool", "list", "-c", file).stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["0", "0", "1", "1"]
    assert [said[0].msg_id in line for line in lines] == [True, True, False, False]
    assert "exchange" in lines[0]
    assert "feedback" in lines[1]
    assert "not a record" in lines[2]


def test_what_the_database_takes_leaves_the_quarantine(file: Path, said: list[Exchange], ledger: Ledger) -> None:
    assert said
    done = ran("spool", "retry", "-c", file)
    assert done.exit_code == 1
    assert done.stdout.startswith("2 records are in the database now, 2 are still refused")
    assert "bytes of ids" in done.stderr
    assert ledger.reports.counts()[State.REWARDED] == 1
    assert len(names(file)) == 2


def test_only_those_named_are_retried(file: Path, said: list[Exchange], ledger: Ledger) -> None:
    assert said
    first, second, *_ = names(file)
    assert ran("spool", "retry", second, "-c", file).exit_code == 0
    assert names(file)[0] == first
    assert ledger.reports.counts()[State.RECORDED] == 0
    with pytest.raises(TuneloopError, match=r"not in quarantine below .*: abc"):
        ran("spool", "retry", "abc", "-c", file)
    assert ran("spool", "retry", first, "-c", file).exit_code == 0
    assert ledger.reports.counts()[State.REWARDED] == 1


def test_an_empty_quarantine_says_so(file: Path, ledger: Ledger) -> None:
    assert ledger
    assert ran("spool", "list", "-c", file).stdout == "nothing is in quarantine\n"
    assert ran("spool", "retry", "-c", file).stdout.startswith("0 records")
