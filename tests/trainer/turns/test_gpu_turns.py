"""Between the trainer's turns at a GPU another has it, and nothing that was learnt is lost or different."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from threading import Event

import pytest
import torch
from structlog.testing import capture_logs

from tests.trainer.factories import commit, eventually, moments_of, sample
from tuneloop.shared.errors import LedgerUnavailable, TurnNotGiven
from tuneloop.shared.job_marks import GpuLocks
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import PinnedMemory
from tuneloop.trainer.gpu_turns import GpuTurns, tensors_of
from tuneloop.trainer.loop import TrainingLoop, run
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.offloading import MovedTensors

BATCHES = [[sample(i) for i in range(4 * at, 4 * at + 4)] for at in range(3)]
TURN_S = 0.3


@pytest.fixture
def engine(settings):
    """An engine's side of the turns."""
    locks = GpuLocks.of(settings().job_dir)
    yield locks
    locks.close()


@pytest.fixture
def stop():
    return threading.Event()


@pytest.fixture
def turns(settings, stop):
    with closing(GpuTurns(settings(cluster={"gpu_turn": TURN_S}), stop)) as made:
        yield made


def weights_of(learner):
    moments = {name: each for kind in learner.optimizers.values() for name, each in moments_of(kind).items()}
    return learner.actor.network.state_dict() | moments


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(each.cpu(), other[name].cpu()) for name, each in one.items())


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_that_was_moved_goes_on_as_one_that_was_not(settings, dtype, bits):
    chosen = settings(trainer={"dtype": dtype}, algorithm={"optimizer": {"lr": 1e-3, "bits": bits}, "kl_coef": 0.1})
    here, moved = snapshot.load(chosen, None), snapshot.load(chosen, None)
    main_memory = PinnedMemory(partial(torch.empty, dtype=torch.uint8))
    for batch in BATCHES:
        here.step(batch)
        moved.step(batch)
        before = {name: each.clone() for name, each in weights_of(moved).items()}
        places = {each.data_ptr() for each in tensors_of(moved)}
        away = MovedTensors(tensors_of(moved), main_memory.take)
        assert places.isdisjoint(each.data_ptr() for each in tensors_of(moved))
        assert_same(weights_of(moved), before)
        saved = snapshot.state_of(moved)
        assert saved.optimizers["actor"]
        away.put_back()
        assert_same(weights_of(moved), before)
    assert_same(weights_of(moved), weights_of(here))


def test_the_gpu_is_had_once_the_engine_lets_go(turns, engine):
    assert engine.held.take()
    taking = threading.Thread(target=turns.take)
    taking.start()
    eventually(engine.wanted_by_trainer.is_held_by_another)
    assert taking.is_alive()
    engine.held.release()
    taking.join(10)
    assert engine.held.is_held_by_another()
    assert not engine.wanted_by_trainer.is_held_by_another()
    turns.take()  # it is ours already


def test_who_closes_without_an_end_keeps_the_gpu_until_its_process_is_no_more(settings, engine):
    chosen, stop = settings(cluster={"gpu_turn": TURN_S}), threading.Event()
    ends = GpuTurns(chosen, stop)
    ends.take()
    ends.end(snapshot.load(settings(), None))
    ends.close()
    assert not engine.held.is_held_by_another()
    child = os.fork()
    if not child:
        fails = GpuTurns(chosen, stop)
        fails.take()
        fails.close()
        time.sleep(2)
        os._exit(0)
    eventually(engine.held.is_held_by_another)
    time.sleep(0.5)
    assert engine.held.is_held_by_another()
    os.waitpid(child, 0)
    assert not engine.held.is_held_by_another()


def test_an_engine_that_waits_comes_before_the_next_turn(settings, turns, engine):
    learner = snapshot.load(settings(), None)
    turns.begin(learner)
    time.sleep(TURN_S)
    turns.end_if_over(learner, publishes=False)  # nobody waits
    assert engine.held.is_held_by_another()
    assert engine.wanted_by_engine.take()
    turns.end_if_over(learner, publishes=True)  # once more as long
    assert engine.held.is_held_by_another()
    turns.end_if_over(learner, publishes=False)
    assert not engine.held.is_held_by_another()
    again = threading.Thread(target=turns.begin, args=(learner,))
    again.start()
    time.sleep(0.2)
    assert again.is_alive()
    assert engine.held.take()
    engine.wanted_by_engine.release()
    engine.held.release()
    again.join(10)
    assert engine.held.is_held_by_another()
    turns.end(learner)
    turns.end(learner)  # nothing more happens
    assert engine.held.take()


def test_what_waits_for_the_publisher_does_not_keep_the_gpu_for_ever(settings, turns, engine):
    learner = snapshot.load(settings(), None)
    turns.begin(learner)
    assert engine.wanted_by_engine.take()
    time.sleep(2 * TURN_S)
    turns.end_if_over(learner, publishes=True)
    assert not engine.held.is_held_by_another()


def test_a_step_takes_the_gpu_first(settings, turns, engine):
    learner, micro_batch = snapshot.load(settings(), None), MicroBatch(settings(), take_gpu=turns.begin)
    assert engine.held.take()
    stepping = threading.Thread(target=lambda: micro_batch.step(learner, BATCHES[0], version=0))
    stepping.start()
    stepping.join(0.5)
    assert stepping.is_alive()
    assert learner.steps == 0
    engine.held.release()
    stepping.join(60)
    assert learner.steps == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_between_turns_a_gpu_is_empty_and_steps_are_the_same(settings, engine, compiled):
    chosen = settings(
        cluster={"gpu_turn": TURN_S, "gpu_per_node": 1},
        trainer={"device": "cuda", "compile": compiled},
        algorithm={"kl_coef": 0.1},
    )
    turns = GpuTurns(chosen, threading.Event())
    turns.take()
    here, moved = snapshot.load(chosen, None), snapshot.load(chosen, None)
    for batch in BATCHES:
        here.step(batch)
        turns.begin(moved)
        moved.step(batch)
        before = torch.cuda.memory_allocated()
        turns.end(moved)
        assert not [each for each in tensors_of(moved) if each.is_cuda]
        # Storages are rounded up to 512 bytes.
        assert before - torch.cuda.memory_allocated() >= len({each.data_ptr() for each in tensors_of(moved)}) * 512
        assert snapshot.state_of(moved).optimizers["actor"]
        assert engine.held.take()
        engine.held.release()
    for name, each in weights_of(here).items():
        assert torch.allclose(each.float().cpu(), weights_of(moved)[name].float().cpu(), atol=1e-6), name


TURNS = {"gpu_turn": 30}


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
        raise TurnNotGiven("stopped while another process has the GPU")

    monkeypatch.setattr(TrainingLoop, "_publish", publish)
    with capture_logs() as logs:
        run(settings(trainer={"total_steps": 2}, cluster=TURNS), stop)
    said = [each["event"] for each in logs]
    assert said.index("steps_not_published") < said.index("trainer_stopped")
    assert ledger.reports.counts()["committed"] == 4
    assert engine.held.take()
