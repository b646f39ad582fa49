"""Out of GPU memory: the micro-batch is halved, the step made again, and the size remembered."""

from threading import Event

import pytest
import torch

from tests.trainer.factories import commit, points, sample
from tuneloop.shared.errors import EnvironmentRefused
from tuneloop.shared.experience import State
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run
from tuneloop.trainer.micro_batch import MicroBatch
from tuneloop.trainer.models.model import Actor

ROWS = [sample(i) for i in range(4)]


@pytest.fixture
def small_gpu(monkeypatch):
    """No more than 300 positions at once have room, and that shows in the second update only."""
    score, calls = Actor.score, []

    def bounded(self, batch):
        calls.append(batch.ids_BT.numel())
        if len(calls) > 3 and calls[-1] > 40:
            raise torch.OutOfMemoryError
        return score(self, batch)

    monkeypatch.setattr(Actor, "score", bounded)
    return calls


def _weights(learner):
    return {name: each.clone() for name, each in learner.actor.network.state_dict().items()}


def test_a_step_that_has_no_room_changes_nothing(settings, small_gpu):
    learner = snapshot.load(settings(trainer={"micro_batch_tokens": 4096}), None)
    before, generator = _weights(learner), learner.generator.get_state()
    small_gpu.extend([0, 0, 0])
    with pytest.raises(torch.OutOfMemoryError):
        learner.step(ROWS)
    assert all(torch.equal(before[name], each) for name, each in _weights(learner).items())
    assert torch.equal(generator, learner.generator.get_state())
    assert learner.steps == 0


def test_it_is_halved_until_the_step_fits_and_remembered(settings, ledger, monkeypatch):
    chosen = settings(trainer={"total_steps": 1, "micro_batch_tokens": 2048})
    step, sizes = snapshot.Learner.step, []

    def bounded(self, samples, *, version=None):
        sizes.append(self.micro_batch_tokens)
        if self.micro_batch_tokens > 512:
            raise torch.OutOfMemoryError
        return step(self, samples, version=version)

    monkeypatch.setattr(snapshot.Learner, "step", bounded)
    commit(ledger, [sample(i) for i in range(8)])
    run(chosen, Event())
    assert sizes == [2048, 1024, 512]
    assert ledger.reports.counts()[State.TRAINED] == 4
    run(settings(trainer={"total_steps": 2, "micro_batch_tokens": 2048}), Event())
    assert sizes[3:] == [512]
    assert len(points(chosen.tensorboard_dir / "trainer", "actor/pg_loss")) == 2
    assert MicroBatch(settings(trainer={"micro_batch_tokens": 4096})).tokens == 4096, "the setting has changed"


def test_where_nothing_fits_it_is_one_sentence(settings, monkeypatch):
    chosen = settings(trainer={"micro_batch_tokens": 512})

    def full(self, samples, *, version=None):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(snapshot.Learner, "step", full)
    chosen.job_dir.mkdir(parents=True)
    learner = snapshot.load(chosen, None)
    with pytest.raises(EnvironmentRefused, match=r"^trainer\.micro_batch_tokens: not even 128 at once fit"):
        MicroBatch(chosen).step(learner, ROWS, version=0)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"setting": 512, "tokens": 0}', b'{"setting": 512, "tokens": 9999}'])
def test_a_file_that_says_nothing_sensible_counts_for_nothing(settings, content):
    chosen = settings(trainer={"micro_batch_tokens": 512})
    chosen.job_dir.mkdir(parents=True)
    (chosen.job_dir / "micro_batch.json").write_bytes(content)
    assert MicroBatch(chosen).tokens == 512
