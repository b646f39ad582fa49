"""The command: `python -m tuneloop.trainer --config trainer.yaml`."""

import signal

import pytest

from tests.trainer.factories import commit, eventually, read_until, sample
from tuneloop.shared.experience import State
from tuneloop.shared.ledger import facts
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.shared.operations.diagnosis import find_silent_trainer


# Which signals stop it is tested of what waits for them, too.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_signal_ends_it_at_once_and_gives_the_rows_back(start, ledger, number):
    commit(ledger, [sample(i) for i in range(8)])
    process = start(trainer={"save_interval": 10, "poll_interval": 60})
    read_until(process, "step=2")
    process.send_signal(number)
    assert process.wait(30) == 0  # it would wait for its next look at the ledger for twice as long
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.COMMITTED: 8}


def test_what_it_cannot_start_with_is_one_sentence_and_an_exit_code(start, tmp_path):
    process = start(model={"model_path": tmp_path / "nowhere"})
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert said.startswith("trainer: model.model_path: ")
    assert said.count("\n") == 1


def test_what_the_disk_refuses_is_one_sentence_and_an_exit_code(start, tmp_path):
    process = start(model={"model_path": tmp_path / ("long" * 100)})
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert said.startswith("trainer: checkpoint_root_dir: ")
    assert str(tmp_path / "tuneloop" / "default") in said
    assert said.count("\n") == 1


def test_one_that_is_stopped_is_silent_until_it_goes_on(start, ledger, monkeypatch):
    def silent():
        return find_silent_trainer(ledger.reports.facts(BatchRules()), ledger.transactions.time())

    process = start()
    read_until(process, "trainer_ready")
    monkeypatch.setattr(facts, "TRAINER_SEEN_S", 5.0)
    assert silent() is None
    process.send_signal(signal.SIGSTOP)
    eventually(silent)
    assert "it is dead, stopped, or cut off from the database; look at its log, start it again" in silent()
    process.send_signal(signal.SIGCONT)
    eventually(lambda: silent() is None)
