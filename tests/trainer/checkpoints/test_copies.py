"""What is copied of a learner is what it was, whatever it learns meanwhile."""

import pytest
import torch

from tests.trainer.factories import sample
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.checkpoints.copies import MemoryCopies

pytestmark = pytest.mark.contract

BATCH = [sample(i) for i in range(8)]


def _weights(learner):
    return {name: each.cpu().clone() for name, each in learner.actor.tensors().items()}


class _Reader:
    """Looks at the weights when it is waited for."""

    def __init__(self, learner):
        self._learner = learner
        self.seen = []

    def wait(self):
        self.seen.append(_weights(self._learner))


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def test_the_next_update_waits_for_who_copies_and_those_after_it_do_not(settings):
    learner = snapshot.load(settings(), None)
    learner.step(BATCH)
    before, first, second = _weights(learner), _Reader(learner), _Reader(learner)
    learner.copying += [first, second]
    learner.step(BATCH)
    assert not _same(before, _weights(learner))
    learner.step(BATCH)
    for each in (first, second):
        [seen] = each.seen
        assert _same(before, seen)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_gpu_copies_beside_the_next_step(settings, what):
    chosen = settings(trainer={"device": "cuda", "dtype": "bfloat16"}, cluster={"gpu_per_node": 1})
    learner = snapshot.load(chosen, None)
    learner.step(BATCH)
    size_of, copy = {
        "weights": (snapshot.size_of_weights, lambda *given: {"": snapshot.copy_weights(*given).tensors}),
        "state": (snapshot.size_of_state, lambda *given: snapshot.copy_state(*given).optimizers),
    }[what]

    def copy_late(learner, room):
        torch.cuda._sleep(2_000_000_000)  # cycles: a second
        return copy(learner, room)

    expected = copy(learner, snapshot.allocate_on_cpu)
    copies = MemoryCopies(size_of, copy_late)
    copies.of(learner)  # which gets memory, and waits for that
    copies.wait()
    learner.copying.clear()
    copied = copies.of(learner)
    [begun] = learner.copying
    assert not begun.query(), "who asks for a copy does not wait for it"
    learner.step(BATCH)
    copies.wait()
    assert all(_same(each, copied[name]) for name, each in expected.items())
    assert not all(_same(each, expected[name]) for name, each in copy(learner, snapshot.allocate_on_cpu).items())
    assert learner.copying == []
