"""A trainer that has a GPU by turns leaves it whenever it has to wait for something else than the GPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from structlog.testing import capture_logs

from tests.trainer.factories import commit, eventually, sample
from tuneloop.shared.errors import LedgerUnavailable, TurnNotGiven
from tuneloop.shared.job_marks import GpuLocks
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer.loop import TrainingLoop, run

TURNS = {"gpu_turn": 30}


@pytest.fixture
def engine(settings):
    """An engine's side of the turns."""
    locks = GpuLocks.of(settings().job_dir)
    yield locks
    locks.close()


class Away(Training):
    """The database is away from the first batch on, until it is back."""

    back = None

    def extend(self, epoch):
        self._require()
        super().extend(epoch)

    def release(self, epoch):
        self._require()
        return super().release(epoch)

    def _require(self):
        if self.back is not None and not self.back.is_set():
            raise LedgerUnavailable("away")

    def lease(self, epoch, size, policy, *, held=()):
        rows = super().lease(epoch, size, policy, held=held)
        if rows and self.back is None:
            self.back = Event()
        return rows


def test_while_the_database_is_away_the_engine_has_the_gpu(settings, ledger, engine):
    commit(ledger, [sample(i) for i in range(12)])
    chosen = settings(trainer={"total_steps": 2, "save_interval": 2}, cluster=TURNS)
    ledger.versions.ensure_base(chosen.model.model_path)
    ledger.training, stop = Away(ledger.transactions, ledger.rewards), Event()
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(TrainingLoop(chosen, ledger, stop).run)
        try:
            eventually(lambda: ledger.training.back is not None)
            eventually(lambda: trainer.done() or engine.held.take())
            for _ in range(20):  # nor does it want it
                assert not engine.wanted_by_trainer.is_held_by_another()
                time.sleep(0.02)
            engine.held.release()
            ledger.training.back.set()
            trainer.result(60)
        finally:
            stop.set()
            if ledger.training.back is not None:
                ledger.training.back.set()
    assert ledger.versions.newest().version == 1
    assert ledger.reports.counts()["trained"] == 8


def test_steps_that_get_no_turn_before_a_stop_are_given_back_and_all_else_is_ended(
    settings, ledger, engine, monkeypatch
):
    commit(ledger, [sample(i) for i in range(4)])
    stop = Event()

    def publish(self):
        stop.set()
        raise TurnNotGiven("told to stop while another has the GPU")

    monkeypatch.setattr(TrainingLoop, "_publish", publish)
    with capture_logs() as logs:
        run(settings(trainer={"total_steps": 2}, cluster=TURNS), stop)
    said = [each["event"] for each in logs]
    assert said.index("steps_not_published") < said.index("trainer_stopped")
    assert ledger.reports.counts()["committed"] == 4
    assert engine.held.take()
