"""The shell's commands of the pages run: `tuneloop` on an experiment of its own, `curl` against a real explorer."""

import json
import re
import shlex
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.documents.conftest import ADMIN_KEY
from tests.doubles.engine import MODEL
from tests.explorer.checkpoints import register, write_model
from tests.explorer.running import RunningExplorer
from tests.factories import committed, exchange, experience, feedback
from tests.house.documents.page_files import PAGES, Block, blocks_of
from tuneloop.cli.main import app
from tuneloop.shared.job_marks import KEY, load_key
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.loader import load_settings

SHELL = [
    block for page in PAGES for block in blocks_of(page) if block.language == "sh" and not block.text.startswith("#!")
]

#: Commands that are understood, but not run: they become services, or need what a test has not.
UNDERSTOOD = {
    "tuneloop run": "it becomes the services",
    "tuneloop init": "tests/cli/setup runs it, with files of real models",
    "tuneloop plan": "the same",
    "tuneloop debug": "tests/runner/tuning/debugging runs it, with workflows",
    "tuneloop tune": "tests/runner/tuning runs it, with tasks",
    "tuneloop restore": "it wants the place empty: tests/cli/data/test_backup_commands.py",
    "tuneloop finetune": "it trains: tests/trainer/test_learnt_files.py",
    "tuneloop import": "no file is there: tests/cli/data/test_import.py",
    "tuneloop db adopt": "no ledger was put back: tests/shared/operations",
    "tuneloop keys revoke": "no such key is there: tests/cli/operations/test_keys.py",
    "tuneloop outbox show": "no record was refused: tests/cli/operations/test_outbox.py",
    "tuneloop outbox drain": "it becomes the explorer's: tests/cli/operations/test_outbox.py",
    "tuneloop raters release": "she is not in quarantine: tests/cli/operations/test_raters.py",
    "tuneloop versions unpin": "none is pinned: tests/cli/test_versions.py",
    "tuneloop policies": "their versions are adapters: tests/cli/operations/test_policies.py",
    "tuneloop jobs": "their versions are adapters: tests/cli/operations/test_jobs.py",
    "tuneloop alarms clear": "no such alarm is open: tests/cli/test_alarms.py",
}


def commands_of(block: Block, program: str) -> list[list[str]]:
    text = block.text.replace("\\\n", " ")
    lines = [
        shlex.split(line.partition(" > ")[0], comments=True)
        for line in text.splitlines()
        if line.startswith(f"{program} ")
    ]
    return [words[1:] for words in lines]


def scenes() -> list[Any]:
    """The commands of each block together; decisions about versions each for itself, for they end each other."""
    found: list[Any] = []
    for block in blocks_with("tuneloop"):
        commands = commands_of(block, "tuneloop")
        alone = {"promote", "reject"} & {words[1] for words in commands if words[0] == "versions"}
        scenes = [[words] for words in commands] if alone else [commands]
        found += [pytest.param(scene, id=f"{block}-{number}") for number, scene in enumerate(scenes)]
    return found


def blocks_with(program: str) -> list[Block]:
    return [block for block in SHELL if commands_of(block, program)]


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tuneloop.yaml, whose experiment has five versions, 3 the champion, and replies with feedback."""
    monkeypatch.chdir(tmp_path)
    values = {"checkpoint_root_dir": "checkpoints", "model": {"model_path": str(write_model(tmp_path / "model"))}}
    Path("tuneloop.yaml").write_text(yaml.safe_dump(values))
    settings = load_settings(Path("tuneloop.yaml"))
    load_key(settings.job_dir / KEY)
    database.upgrade(settings.database_url)
    with closing(Ledger.of(settings)) as ledger:
        ledger.own(settings.project, settings.name)
        ledger.versions.ensure_base(Path(values["model"]["model_path"]))
        for number in range(1, 6):
            epoch = register(ledger, settings.job_dir)
            if number <= 3:
                ledger.versions.promote(number)
        committed(ledger, 1)
        message = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "user": "ann"}).encode()
        ledger.recording.record(
            [exchange(msg_id="m", tenant="default", user="ann", request=message, experiences=(experience(),))]
        )
        ledger.recording.record([feedback(msg_id="m", tenant="default", source="eve")])
        ledger.training.end(epoch)
    return tmp_path


def understood(words: list[str]) -> None:
    """Whether the arguments are those of a command; it is not run. Raises click's errors otherwise."""
    context = typer.main.get_command(app).make_context("tuneloop", list(words))
    command = context.command
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("commands", scenes())
def test_commands_of_tuneloop_run(commands: list[list[str]], experiment: Path) -> None:
    for words in commands:
        here = ["m" if word == "ID" else word.replace("/backups", str(experiment)) for word in words]
        if any(" ".join(["tuneloop", *here]).startswith(begin) for begin in UNDERSTOOD):
            understood(here)
            continue
        result = CliRunner().invoke(app, here)
        assert result.exit_code == 0, (words, result.output, result.exception)


@pytest.mark.parametrize("block", blocks_with("curl"), ids=str)
def test_its_requests_are_answered(block: Block, explorer: RunningExplorer) -> None:
    """As they stand, but for the ids, of replies that are there, and the names."""
    reply = explorer.chat(n=2, metadata={"task_id": "task-1", "run_id": "0"}).json()["id"]
    explorer.until_flushed()
    text = re.sub(r"resp_ID|msg_…|chatcmpl-…|\bID\b", reply, block.text)
    text = re.sub(r"(?:http://)?localhost:8010", explorer.url, text).replace("$KEY", ADMIN_KEY)
    text = (
        text.replace('"NAME"', f'"{MODEL}"').replace("versions/3/", "versions/0/").replace('"expect": 3', '"expect": 0')
    )
    for words in commands_of(Block(block.page, block.line, "sh", text), "curl"):
        command = ["curl", "-sS", "--max-time", "30", "-w", "\n%{http_code}", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        answer, _, status = done.stdout.rpartition("\n")
        assert (done.returncode, status) == (0, "200"), (words, answer, done.stderr)


def test_what_is_not_understood_is_found() -> None:
    with pytest.raises(Exception, match="nope"):
        understood(["versions", "list", "--nope"])
