"""A trainer that is killed between a version's registration and the end of its critic and optimiser."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.doubles.warm.process import TRAINING, WarmProcess
from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints import check_files, is_weights_only, read_manifest
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.settings.settings import Settings

pytestmark = pytest.mark.contract

#: Two trainers, forked, for the imports take longest. The first kills itself when it is about to do, for the so manieth
#: time, what an audit event tells of a path that ends so; the second begins after a line of input.
TRAINERS = """
import os, signal, sys
from tuneloop.trainer import loop
from tuneloop.trainer.__main__ import main

config, event, end, times = *sys.argv[1:4], int(sys.argv[4])

def kill(name, arguments):
    global times
    if name == event and "-state" in str(arguments[0]) and str(arguments[0]).endswith(end):
        times -= 1
        if not times:
            os.kill(os.getpid(), signal.SIGKILL)

for hooks in ([kill], []):
    if not (child := os.fork()):
        for each in hooks:
            sys.addaudithook(each)
        os._exit(main(["--config", config]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
"""

#: Nothing of the state is there yet; the critic lies beside the weights; only the manifest is missing.
MOMENTS = {
    "begun": ("os.mkdir", "-state"),
    "critic": ("os.rename", "/trainer_state/actor.safetensors"),
    "manifest": ("os.rename", "/state_manifest.json"),
}


@pytest.fixture
def trainers(settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts both, each of up to four steps in all; ended with the test."""
    config, started = tmp_path / "trainer.yaml", []
    tree = settings(trainer={"total_steps": 4, "max_checkpoints_to_keep": 0}).model_dump(
        mode="json", exclude_unset=True
    )
    config.write_text(yaml.safe_dump(tree))

    def start(event: str, end: str, times: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", TRAINERS, str(config), event, end, str(times)]
        with (tmp_path / "log").open("w") as log:
            process = WarmProcess(
                command,
                modules=TRAINING,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("moment", "times"), [("begun", 1), ("critic", 2), ("manifest", 2)])
def test_each_row_is_in_one_version_and_training_goes_on_with_the_state_that_there_is(
    trainers: Callable[..., "subprocess.Popen[str]"], ledger: Ledger, tmp_path: Path, moment: str, times: int
) -> None:
    commit(ledger, [sample(i) for i in range(16)])
    process, log = trainers(*MOMENTS[moment], times), tmp_path / "log"
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "-9\n", log.read_text()
    newest = ledger.versions.newest()
    assert newest.version >= times
    assert is_weights_only(newest.path)
    check_files(newest.path, read_manifest(newest.path, sha256=newest.manifest_sha256))
    assert ledger.reports.counts()[State.TRAINED] == 4 * newest.version

    before = len(log.read_text())
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0\n", log.read_text()
    said = log.read_text()[before:]
    assert ("optimizer_begins_anew" in said) == (times == 1)
    assert [f"version={newest.version}" in line for line in said.splitlines() if "trainer_ready" in line] == [True]
    assert ("state_resumed_from" in said) == (times == 2)
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 16}
    assert [each.consumed for each in ledger.versions.all()] == [0, 4, 4, 4, 4]
    last = ledger.versions.newest()
    assert not is_weights_only(last.path)
    assert not list(last.path.parent.glob(".staging*"))
    assert ledger.reports.imbalance() == []
