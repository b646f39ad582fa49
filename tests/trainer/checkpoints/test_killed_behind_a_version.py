"""A trainer that is killed between a version's registration and the end of its critic and optimiser."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints.file_checks import check_files, is_weights_only
from tuneloop.shared.checkpoints.manifest import read_manifest
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

#: Kills itself when it is about to do, for the so manieth time, what an audit event tells of a path that ends so.
KILLS = """
import os, signal, sys
from tuneloop.trainer.__main__ import main

event, end, times = sys.argv[2], sys.argv[3], int(sys.argv[4])

def kill(name, arguments):
    global times
    if name == event and "-state" in str(arguments[0]) and str(arguments[0]).endswith(end):
        times -= 1
        if not times:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
sys.exit(main(["--config", sys.argv[1]]))
"""

#: Nothing of the state is there yet; the critic lies beside the weights; only the manifest is missing.
MOMENTS = {
    "begun": ("os.mkdir", "-state"),
    "critic": ("os.rename", "/trainer_state/actor.safetensors"),
    "manifest": ("os.rename", "/state_manifest.json"),
}


@pytest.fixture
def trainer(settings: Callable[..., Settings], tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a trainer of four steps to its end, whichever that is."""
    config = tmp_path / "trainer.yaml"
    tree = settings(trainer={"total_steps": 4, "max_checkpoints_to_keep": 0}).model_dump(
        mode="json", exclude_unset=True
    )
    config.write_text(yaml.safe_dump(tree))

    def run(*kills: str) -> "subprocess.CompletedProcess[str]":
        module = ["-m", "tuneloop.trainer", "--config", str(config)]
        command = [sys.executable, *(["-c", KILLS, str(config), *kills] if kills else module)]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)

    return run


@pytest.mark.parametrize(("moment", "times"), [("begun", 1), ("critic", 2), ("manifest", 2)])
def test_each_row_is_in_one_version_and_training_goes_on_with_the_state_that_there_is(
    trainer: Callable[..., "subprocess.CompletedProcess[str]"], ledger: Ledger, moment: str, times: int
) -> None:
    commit(ledger, [sample(i) for i in range(16)])
    killed = trainer(*MOMENTS[moment], str(times))
    assert killed.returncode == -9, killed.stderr
    newest = ledger.versions.newest()
    assert newest.version >= times
    assert is_weights_only(newest.path)
    check_files(newest.path, read_manifest(newest.path, sha256=newest.manifest_sha256))
    assert ledger.reports.counts()[State.TRAINED] == 4 * newest.version

    ended = trainer()
    assert ended.returncode == 0, ended.stderr
    begun = f"version={newest.version}"
    assert ("optimizer_begins_anew" in ended.stderr) == (times == 1)
    assert [begun in line for line in ended.stderr.splitlines() if "trainer_ready" in line] == [True]
    assert ("state_resumed_from" in ended.stderr) == (times == 2)
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 16}
    assert [each.consumed for each in ledger.versions.all()] == [0, 4, 4, 4, 4]
    last = ledger.versions.newest()
    assert not is_weights_only(last.path)
    assert not list(last.path.parent.glob(".staging*"))
    assert ledger.reports.imbalance() == []
