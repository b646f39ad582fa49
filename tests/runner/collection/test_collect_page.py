"""The examples of records, preferences and versions run: docs/tune.md, giving_feedback.md, versions.md."""

from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import MODEL
from tests.explorer.running import RunningExplorer
from tests.house.documents.page_files import python_of
from tests.runner.collection.conftest import KEY

BLOCKS = [
    *python_of("tune.md", "Records"),
    *python_of("giving_feedback.md", "Preferences"),
    *python_of("versions.md", "From a program"),
]


def test_its_python_runs(trying: RunningExplorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trying.chat(metadata={"task_id": "task-1", "run_id": "0"})
    trying.until_flushed()
    names: dict[str, Any] = {}
    for block in BLOCKS:
        mine = block.replace("http://localhost:8010", trying.url).replace('"KEY"', repr(KEY))
        exec(mine.replace('model="tiny"', f'model="{MODEL}"'), names)  # noqa: S102 - our own page
    assert names["preference"].sent
    assert names["report"].keys["a"] + names["report"].keys["b"] == 4
