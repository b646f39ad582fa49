"""A trainer that stands still in the middle of a publication, and wakes up when another has taken over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
import yaml

from tests.conftest import Place
from tests.doubles.warm.process import TRAINING, WarmProcess
from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints import check_files, read_manifest
from tuneloop.shared.errors import StaleEpoch
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.settings import Settings
from tuneloop.trainer.loop import run

pytestmark = pytest.mark.contract

#: Stops itself, once, when a checkpoint is about to get its name.
FREEZES = """
import os, signal, sys
from tuneloop.trainer.__main__ import main

frozen = []

def freeze(event, arguments):
    renames = event == "os.rename" and "global_step_" in str(arguments[1]) and ".staging-" in str(arguments[0])
    if renames and not frozen:
        frozen.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)

sys.addaudithook(freeze)
sys.exit(main(["--config", sys.argv[1]]))
"""

#: So long may a successor wait for what a trainer that stands still holds.
SUCCESSOR_S = 15


@pytest.fixture
def chosen(settings: Callable[..., Settings], postgres_place: Place) -> Settings:
    experience_buffer = {"path": postgres_place.url, "name": postgres_place.schema}
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": experience_buffer}}
    return settings(buffer=buffer, trainer={"total_steps": 1})


@pytest.fixture
def ledger(chosen: Settings) -> Iterator[Ledger]:
    schema = chosen.buffer.trainer_input.experience_buffer.name
    database.upgrade(chosen.database_url, schema=schema)
    ledger = Ledger(database.connect(chosen.database_url, schema=schema))
    yield ledger
    ledger.close()


@pytest.fixture
def frozen(chosen: Settings, ledger: Ledger, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A trainer that stands still in the transaction that registers its version."""
    commit(ledger, [sample(i) for i in range(8)])
    tree = chosen.model_dump(mode="json", exclude_unset=True)
    tree["buffer"]["trainer_input"]["experience_buffer"]["path"] = chosen.database_url
    config = tmp_path / "trainer.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-c", FREEZES, str(config)]
    process = WarmProcess(command, modules=TRAINING, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while _state(process.pid) != "T":
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _wake(process: "subprocess.Popen[str]") -> str:
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=60)[1]


@pytest.mark.postgres
def test_it_keeps_no_successor_waiting_and_takes_nothing_away_from_it(
    chosen: Settings, ledger: Ledger, frozen: "subprocess.Popen[str]"
) -> None:
    began = time.monotonic()
    run(chosen, Event())
    assert time.monotonic() - began < SUCCESSOR_S
    said = _wake(frozen)
    assert frozen.returncode == StaleEpoch.exit_code, said
    newest = ledger.versions.newest()
    manifest = read_manifest(newest.path, sha256=newest.manifest_sha256)
    check_files(newest.path, manifest)
    assert (newest.version, manifest.epoch) == (1, 2)
    assert [path.name for path in chosen.job_dir.glob("global_step_*")] == [newest.path.name]
    assert not list(chosen.job_dir.glob(".*"))
    assert ledger.reports.imbalance() == []


@pytest.mark.postgres
def test_what_it_put_there_before_its_successor_came_is_pruned_when_another_has_its_number(
    chosen: Settings, ledger: Ledger, frozen: "subprocess.Popen[str]"
) -> None:
    with ledger.transactions.engine.connect() as connection:
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'"
        connection.exec_driver_sql(ended)
    ledger.training.take_epoch("another")
    _wake(frozen)
    orphan = chosen.job_dir / "global_step_1"
    assert read_manifest(orphan).epoch == 1
    assert ledger.versions.newest().version == 0
    run(chosen, Event())
    newest = ledger.versions.newest()
    check_files(newest.path, read_manifest(newest.path, sha256=newest.manifest_sha256))
    assert (newest.version, newest.path.name) == (1, "global_step_1-1")
    assert not orphan.exists()
    run(chosen.model_copy(update={"trainer": chosen.trainer.model_copy(update={"total_steps": 2})}), Event())
    assert sorted(path.name for path in chosen.job_dir.glob("global_step_*")) == ["global_step_1-1", "global_step_2"]
    assert os.listdir(ledger.versions.newest().path)
