"""A trainer of two workers of Ray Train: one is killed, and the job goes on by itself."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.trainer.factories import commit, sample
from tuneloop.shared.errors import LedgerError
from tuneloop.shared.experience import State


def _ray_workers():
    """The pids of Ray Train's workers on this machine that are below this process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
                session = os.getsid(int(folder.name))
            except OSError:
                continue
            if b"RayTrainWorker" in title and session == os.getsid(0):
                found.append(int(folder.name))
    return sorted(found)


def _newest(ledger):
    with suppress(LedgerError):
        return ledger.versions.newest().version
    return 0


def _until(condition, process):
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.soak
@pytest.mark.xdist_group("ray")
def test_a_killed_worker_of_ray_train_is_replaced_and_exactly_once_holds(settings, ledger, tmp_path):
    commit(ledger, [sample(i) for i in range(8)])
    config = tmp_path / "trainer.yaml"
    chosen = settings(trainer={"workers": 2, "save_interval": 2}, cluster={"ray_address": "local"})
    config.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "tuneloop.trainer", "--config", str(config)]
    process = subprocess.Popen(command, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"})
    try:
        for killed, rows in ((0, 8), (1, 16)):
            _until(lambda version=killed + 1: _newest(ledger) == version, process)
            workers = _ray_workers()
            assert len(workers) == 2
            commit(ledger, [sample(i) for i in range(rows, rows + 8)])
            os.kill(workers[killed], signal.SIGKILL)
        _until(lambda: _newest(ledger) == 3, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.terminate()
        process.wait(60)
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 24}
    assert [each.consumed for each in ledger.versions.all()] == [0, 8, 8, 8]
    assert ledger.reports.imbalance() == []
