"""Long work says on a terminal how far it is, and says nothing of it in a pipe."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.warm.process import WarmProcess
from tests.factories import exchange, experience
from tuneloop.shared.ledger.ledger import Ledger

ROWS = 450
MAIN = "from tuneloop.cli.main import main; main()"


@pytest.fixture(autouse=True)
def _replies(ledger: Ledger) -> None:
    ledger.recording.record([exchange(tenant="default", user="ann", experiences=(experience(),)) for _ in range(ROWS)])


def on_terminal(*arguments: object) -> tuple[str, str]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-c", MAIN, *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm"}
    with WarmProcess(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0, shown.decode()
    return output, shown.decode()


def test_an_export_an_import_and_a_purge_count_on_a_terminal(file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    output, shown = on_terminal("export", "-c", file, "--format", "experiences", "--to", rows)
    assert output == f"{rows}: {ROWS} rows\n"
    assert re.search(r"writing rows\.jsonl .*\b400\b", shown)  # it counts by hundreds
    output, shown = on_terminal("import", "-c", file, rows)
    assert output == f"{rows}: {ROWS} rows, 0 of them new\n"
    assert "checking rows.jsonl" in shown
    assert "importing rows.jsonl" in shown
    output, shown = on_terminal("purge", "-c", file, "--state", "recorded", "--older-than", "0s", "--json")
    assert json.loads(output)["experiences"] == {"recorded": ROWS}
    assert "deleting" in shown


def test_nothing_of_it_is_in_a_pipe(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", MAIN, "export", "-c", str(file), "--format", "experiences"]
    flags, pipe = ["--to", str(tmp_path / "a.jsonl")], subprocess.PIPE
    with WarmProcess([*command, *flags], stdout=pipe, stderr=pipe, text=True) as done:
        _, errors = done.communicate()
    assert done.returncode == 0
    assert errors == ""
