"""Ten tasks of users, each done by following one page: its first block runs as it stands, and the task is done.

Those that need AgentScope, a trainer, a judge or a cluster run elsewhere.
"""

import re
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.documents.test_shell import commands_of
from tests.documents.test_shell import experiment as experiment
from tests.explorer.running import RunningExplorer, eventually
from tests.house.documents.page_files import DOCS, ROOT, blocks_of, part_below
from tuneloop.cli.main import app
from tuneloop.shared.experience import VersionState
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.loader import load_settings

ELSEWHERE = {
    "serve and give a thumb: quick_start.md": "tests/documents/test_python.py",
    "tune an AgentScope agent: tune.md": "tests/runner/tuning/test_views.py",
    "train on a file of conversations: files.md": "tests/trainer/test_learnt_files.py",
    "ask a judge: giving_feedback.md": "tests/runner/test_docs.py",
    "move from another tool: limits.md": "tests/documents/test_python.py",
    "run on Kubernetes: several_machines.md": "tests/deploy/test_files.py",
}


def run(page: str) -> str:
    """Run the first block of the page, as it stands; what it printed."""
    printed = ""
    for words in commands_of(next(blocks_of(DOCS / page)), "tuneloop"):
        result = CliRunner().invoke(app, ["m" if word == "ID" else word for word in words])
        assert result.exit_code == 0, (words, result.output)
        printed += result.output
    return printed


@pytest.mark.parametrize("task", ELSEWHERE)
def test_the_task_is_done_by_another_test(task: str) -> None:
    assert task.rpartition(" ")[2] in (ROOT / ELSEWHERE[task]).read_text()


def test_a_version_is_rolled_back(experiment: Path) -> None:
    run("versions.md")
    with closing(Ledger.of(load_settings(Path("tuneloop.yaml")))) as after:
        states = {each.version: each.state for each in after.versions.all()}
        pinned = after.versions.pinned_version()
    assert states[3] == VersionState.ROLLED_BACK
    assert getattr(pinned, "version", None) == 2


def test_a_reply_is_explained(experiment: Path) -> None:
    assert re.search(r"choice 0: feedback \d+ .*eve", run("explain.md"))


def test_a_person_is_erased(experiment: Path) -> None:
    run("privacy.md")
    with closing(Ledger.of(load_settings(Path("tuneloop.yaml")))) as after:
        assert after.exchange_views.get("default", "m") is None


def test_a_preference_becomes_two_rewards(explorer: RunningExplorer) -> None:
    section = part_below((DOCS / "giving_feedback.md").read_text(), "Preferences")
    reply = explorer.chat(n=2).json()["id"]
    [body] = re.findall(r"-d '(.*)'", section)
    assert explorer.http.post("/feedback", content=body.replace("ID", reply)).json()["accepted"] == 1
    [settings] = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert yaml.safe_load(settings)["reward"]["weights"] == {"preference": 1.0}
    eventually(lambda: explorer.rows("SELECT kind, other_choice FROM feedback") == [("preference", 1)])
