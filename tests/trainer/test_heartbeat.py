"""A trainer that is busy is alive, and one that was overtaken is told so while it is busy."""

import time
from collections.abc import Callable
from threading import Event, Thread

import pytest
from sqlalchemy import select

from tests.factories import committed
from tests.trainer.factories import commit, eventually, sample
from tuneloop.shared.errors import StaleEpoch
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import epochs, experiences
from tuneloop.shared.ledger.training.training import Training
from tuneloop.trainer import heartbeat
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.heartbeat import Heartbeat
from tuneloop.trainer.loop import TrainingLoop


class Busy(Training):
    """While this trainer takes a batch, which lasts until `done`, something `happens`."""

    happens: Callable[[], object] = staticmethod(lambda: None)
    done: Callable[[], bool] = staticmethod(lambda: True)

    def lease(self, epoch, size, policy, *, held=()):
        rows = super().lease(epoch, size, policy, held=held)
        self.happens()
        eventually(self.done)
        return rows


def seen(ledger, epoch=1):
    with ledger.transactions.engine.connect() as connection:
        return connection.execute(select(epochs.c.seen_at, epochs.c.ended_at).where(epochs.c.epoch == epoch)).one()


def test_a_beat_says_that_the_trainer_lives_and_keeps_its_leases(ledger):
    now = [1000.0]
    clocked = Ledger(ledger.transactions.engine, clock=lambda: now[0])
    committed(clocked, 1)
    epoch = clocked.training.take_epoch("trainer")
    clocked.training.lease(epoch, 1, BatchRules())
    now[0] = 1500.0
    Heartbeat(clocked, epoch, Event()).beat()
    with ledger.transactions.engine.connect() as connection:
        [lease_until] = connection.execute(select(experiences.c.lease_until)).scalars()
    assert seen(ledger).seen_at == 1500.0
    assert lease_until > 1500.0


def test_it_beats_while_the_trainer_is_busy(settings, ledger):
    busy = ledger.training = Busy(ledger.transactions, ledger.rewards)
    first = []
    busy.happens = lambda: first.append(seen(ledger).seen_at)
    busy.done = lambda: seen(ledger).seen_at > first[0]
    ledger.versions.ensure_base(settings().model.model_path)
    commit(ledger, [sample(i) for i in range(4)])
    TrainingLoop(settings(trainer={"total_steps": 1}), ledger, Event(), beat_s=0.01).run()
    assert ledger.reports.counts()[State.TRAINED] == 4


def test_a_trainer_that_was_overtaken_while_busy_is_told_to_stop(settings, ledger):
    stop = Event()
    busy = ledger.training = Busy(ledger.transactions, ledger.rewards)
    busy.happens = lambda: Ledger(ledger.transactions.engine).training.take_epoch("another")
    busy.done = stop.is_set
    ledger.versions.ensure_base(settings().model.model_path)
    with pytest.raises(StaleEpoch, match="epoch 2 has taken over"):
        TrainingLoop(settings(), ledger, stop, beat_s=0.01).run()
    assert seen(ledger, 2).ended_at is None


def test_work_that_stands_still_is_an_alarm_until_it_moves_and_a_wait_is_none(settings, ledger, monkeypatch):
    """A version's files are being written, on a disk that does not answer: in the loop's thread, or in its own."""
    monkeypatch.setattr(heartbeat, "STILL_S", 1.0)
    held, go_on, stop = Event(), Event(), Event()
    save = snapshot.save_weights

    def hold(*arguments, **options):
        held.set()
        go_on.wait()
        return save(*arguments, **options)

    monkeypatch.setattr(snapshot, "save_weights", hold)
    ledger.versions.ensure_base(settings().model.model_path)
    for behind in (False, True):
        (held.clear(), go_on.clear(), stop.clear())
        commit(ledger, [sample(i + 10 * behind) for i in range(4)])
        loop = TrainingLoop(settings(trainer={"async_save": behind}), ledger, stop, beat_s=0.1)
        training = Thread(target=loop.run)
        training.start()
        assert held.wait(60)
        eventually(lambda: [each.name for each in ledger.alarms.all()] == ["trainer_stuck"])
        assert "in tuneloop.trainer.checkpoints.publication.register" in ledger.alarms.all()[0].reason
        go_on.set()
        eventually(lambda newest=1 + behind: ledger.versions.newest().version == newest)
        eventually(lambda: ledger.alarms.all() == [])
        time.sleep(2)  # it waits for rows, and looks for them
        assert ledger.alarms.all() == []
        stop.set()
        training.join(60)
