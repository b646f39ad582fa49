"""The examples of docs/files.md, Tasks from logs, run as they stand, and name what there is."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.house.documents.page_files import DOCS, part_below
from tests.runner.logs.writing import ANSWER, USER, write_lines
from tuneloop.runner.__main__ import main as run_command
from tuneloop.runner.tasks.tasks_command import make_parser

PAGE = part_below((DOCS / "files.md").read_text(), "Tasks from logs")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    again = [{"role": "user", "content": "May I send the order of shoes back?"}, ANSWER]
    write_lines(Path("log.jsonl"), [{"messages": each, "reward": 1.0} for each in ([USER, ANSWER], again)])
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 - our own page
    assert [task.answer for task in names["few"]] == ["On its way."] * 2


def test_its_commands_are_understood() -> None:
    commands = [
        shlex.split(line, comments=True)
        for block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("python -m tuneloop.runner tasks")
    ]
    assert len(commands) == 2
    for command in commands:
        make_parser().parse_args(command[4:])


def test_the_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in (("tasks", "import"), ("shadow", "--reward")):
        with pytest.raises(SystemExit) as ended:
            run_command([name, "--help"])
        assert ended.value.code == 0
        assert option in capsys.readouterr().out
