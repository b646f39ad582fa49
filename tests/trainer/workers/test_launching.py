"""A trainer of two workers against a real ledger: exactly once, whichever of them is killed in mid-step."""

import os
import re
import signal
import time
from threading import Event

import pytest
from structlog.testing import capture_logs

from tests.trainer.factories import commit, points, read_until, sample
from tuneloop.shared.checkpoints import is_weights_only
from tuneloop.shared.experience import State
from tuneloop.trainer.workers.launching import launch


@pytest.fixture
def start(start):
    """Starts a trainer of two workers; ended with the test."""
    return lambda **but: start(**{"trainer": {"workers": 2, "save_interval": 2}, **but})


def _pids(process):
    """Those of rank 0 and rank 1."""
    return [int(each) for each in re.findall(r"\d+", read_until(process, "ranks_started").partition("pids=")[2])]


def test_a_worker_killed_in_mid_step_is_continued_from_the_last_version(start, ledger, settings):
    rows = [sample(i) for i in range(32)]
    commit(ledger, rows[:12])
    process = start()

    leader, follower = _pids(process)
    read_until(process, "step=3")
    os.kill(follower, signal.SIGSTOP)  # so that rank 0 waits for it within a step
    commit(ledger, rows[12:24])
    time.sleep(2)
    os.kill(follower, signal.SIGKILL)
    read_until(process, "ranks_start_again")

    leader, follower = _pids(process)
    read_until(process, "step=6")
    os.kill(follower, signal.SIGSTOP)
    commit(ledger, rows[24:])
    time.sleep(2)
    os.kill(leader, signal.SIGKILL)
    os.kill(follower, signal.SIGCONT)
    read_until(process, "ranks_start_again")

    _pids(process)
    read_until(process, "version=4")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 32}
    assert [(each.step, each.consumed) for each in ledger.versions.all()] == [(0, 0), (2, 8), (4, 8), (6, 8), (8, 8)]
    assert ledger.reports.imbalance() == []
    assert not is_weights_only(ledger.versions.newest().path)
    assert [step for step, _ in points(settings().tensorboard_dir / "trainer", "actor/pg_loss")] == list(range(1, 9))


def test_what_the_workers_cannot_start_with_is_one_sentence_and_an_exit_code(start, tmp_path):
    process = start(model={"model_path": tmp_path / "nowhere"})
    said = process.stderr.read()
    assert process.wait(10) == 3
    assert len([line for line in said.splitlines() if line.startswith("trainer: ")]) == 1
    assert "trainer: model.model_path: " in said


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 4", 4),
        ("[ $RANK = 0 ] && exec sleep 60; exit 3", 3),  # the one that has no reason of its own is killed
        ("[ $RANK = 1 ] && exec sleep 60; exit 0", 0),
    ],
)
def test_the_worker_that_has_a_reason_says_how_all_end(script, code, monkeypatch):
    monkeypatch.setattr("tuneloop.trainer.workers.launching._GRACE_S", 0.5)
    with capture_logs() as said:
        assert launch(["sh", "-c", script], 2, Event()) == code
    hung = [int(each) for each in re.findall(r"RANK = (\d) \] && exec sleep", script)]
    assert [each["rank"] for each in said if each["event"] == "rank_hung"] == hung


def test_workers_are_started_again_when_one_is_killed(tmp_path):
    starts = tmp_path / "starts"
    script = f"[ $RANK = 1 ] && exit 0; echo >> {starts}; [ $(wc -l < {starts}) = 1 ] && kill -9 $$; exit 0"
    assert launch(["sh", "-c", script], 2, Event()) == 0
    assert len(starts.read_text()) == 2
