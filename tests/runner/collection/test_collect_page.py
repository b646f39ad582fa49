"""The examples of docs/collect.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tests.install.wheels import ROOT
from tests.runner.collection.conftest import KEY
from tuneloop.cli.exports import ExportRequest, Format, export
from tuneloop.shared.ledger.export import Selection

PAGE = (ROOT / "docs" / "collect.md").read_text()


def test_its_python_runs(trying: RunningExplorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trying.chat(metadata={"task_id": "task-1", "run_id": "0"})
    trying.until_flushed()
    export(trying.ledger, ExportRequest(Format("experiences"), Selection("default")), Path("rows.jsonl"))
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        mine = block.replace("http://localhost:8010", trying.url).replace('"KEY"', repr(KEY))
        exec(mine.replace('model="tiny"', f'model="{MODEL}"'), names)  # noqa: S102 - our own page
    assert names["preference"].sent
    assert names["report"].keys["a"] + names["report"].keys["b"] == 4
