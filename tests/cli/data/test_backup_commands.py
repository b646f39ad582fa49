"""`tuneloop backup` and `tuneloop restore`, as people and programs give them."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.explorer.checkpoints import register, write_model
from tests.factories import committed
from tuneloop.cli.main import app
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.loader import load_settings


def settings_file(folder: Path, model: Path) -> Path:
    folder.mkdir()
    path = folder / "x.yaml"
    path.write_text(
        yaml.safe_dump({"checkpoint_root_dir": str(folder / "checkpoints"), "model": {"model_path": str(model)}})
    )
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model = write_model(tmp_path / "model")
    made, other = (settings_file(tmp_path / name, model) for name in ("made", "other"))
    settings = load_settings(made)
    database.upgrade(settings.database_url)
    with closing(Ledger.of(settings)) as ledger:
        ledger.own(settings.project, settings.name)
        ledger.versions.ensure_base(model.absolute())
        committed(ledger, 3)
        epoch = register(ledger, settings.job_dir)
        ledger.training.end(epoch)
    return made, other


def tell(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_people_and_programs_are_told_what_is_in_it(files: tuple[Path, Path], tmp_path: Path) -> None:
    made, other = files
    said = tell("backup", tmp_path / "monday", "-c", made)
    assert said.startswith(f"{tmp_path}/monday: tuneloop/default as of 20")
    assert said.endswith(", versions 1\n")
    assert tell("backup", tmp_path / "monday", "-c", made, "--check") == said
    told = json.loads(tell("backup", tmp_path / "monday", "-c", made, "--check", "--json"))
    assert (told["project"], told["name"], told["versions"]) == ("tuneloop", "default", [1])
    restoring = tell("restore", tmp_path / "monday", "-c", other)
    assert restoring.startswith(f"{said}restored; the next version is 2001\nwhat was acknowledged after 20")
    assert "may be missing" in restoring
    third = settings_file(tmp_path / "third", tmp_path / "model")
    restored = json.loads(tell("restore", tmp_path / "monday", "-c", third, "--next-version", 2, "--json"))
    assert restored == told | {"next_version": 2}
