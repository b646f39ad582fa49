"""docs/files.md, Export and import: its rows have the columns of real ones, and its Python runs on real files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.data.exporting import about, asked
from tests.house.documents.page_files import DOCS, part_below
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.export import Selection
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.ledger.storage.schema import metadata

PAGE = part_below((DOCS / "files.md").read_text(), "Export and import")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = Ledger(database.connect(f"sqlite:///{tmp_path}/ledger.db"))
    metadata.create_all(ledger.transactions.engine)
    good, bad = asked("Good."), asked("Bad.")
    ledger.recording.record([good, bad, about(good), about(bad, value=0.0), about(good, Kind.BOOLEAN, metric="thumb")])
    for format_ in Format:
        for kind in ("jsonl", "parquet"):
            export(ledger, ExportRequest(format_, Selection("acme")), tmp_path / f"{format_}.{kind}")
    ledger.close()
    return tmp_path


def shape(value: Any) -> Any:
    return {name: shape(inner[0]) if name == "feedback" else None for name, inner in value.items()}


def test_its_rows_have_the_columns_of_real_ones(folder: Path) -> None:
    shown = [json.loads(block) for block in blocks("json")]
    real = [json.loads((folder / f"{name}.jsonl").read_text().splitlines()[0]) for name in Format]
    assert [shape(row) for row in shown] == [shape(row) for row in real]


@pytest.mark.parametrize("block", [block for block in blocks("python") if "trl" not in block])
def test_its_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    monkeypatch.chdir(folder)
    exec(block, {})  # noqa: S102 - the page is ours


@pytest.mark.parametrize("block", [block for block in blocks("python") if "trl" in block])
def test_its_python_for_trl_compiles(block: str) -> None:
    """TRL is too heavy for every run of the tests."""
    compile(block, "files.md", "exec")
