"""The experiment of these tests, and how commands are given."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.databases import put_file
from tuneloop.cli.main import app
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

Run = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"checkpoint_root_dir": str(tmp_path), "model": {"model_path": "some/model"}}))
    return path


@pytest.fixture
def settings(file: Path) -> Settings:
    return Settings.model_validate(yaml.safe_load(file.read_text()))


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    put_file(settings.database_url, "migrated")
    load_key(settings.job_dir / KEY)
    ledger = Ledger.of(settings)
    yield ledger
    ledger.close()


@pytest.fixture
def run(file: Path) -> Run:
    return lambda *words: CliRunner().invoke(app, [*map(str, words), "-c", str(file)], catch_exceptions=False)
