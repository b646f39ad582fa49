"""The trainer goes on from what the ledger says, whatever is decided about its versions meanwhile."""

from threading import Event

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.factories import commit, sample
from tuneloop.shared.checkpoints import read_manifest
from tuneloop.shared.experience import State
from tuneloop.trainer import learner
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.loop import run


@pytest.fixture
def trained(settings, ledger):
    """A ledger with rows for more steps, in which version 1 is the champion and version 2 a candidate."""
    ledger.versions.ensure_base(settings().model.model_path)
    commit(ledger, [sample(i) for i in range(24)])
    run(settings(trainer={"total_steps": 1}), Event())
    ledger.versions.promote(1)
    run(settings(trainer={"total_steps": 2}), Event())
    return ledger


def _parents(ledger):
    return {each.version: read_manifest(each.path).parent for each in ledger.versions.all() if each.version}


def _states(ledger):
    return [str(each.state) for each in ledger.versions.all()]


def test_a_trainer_that_starts_again_goes_on_from_a_canary(settings, trained):
    trained.versions.begin_canary(2, by="explorer", reason="a tenth")
    run(settings(trainer={"total_steps": 3}), Event())
    assert _parents(trained) == {1: 0, 2: 1, 3: 2}
    assert _states(trained) == ["retired", "champion", "canary", "candidate"]


def test_after_a_rollback_it_goes_on_from_the_champion_and_no_number_comes_twice(settings, trained):
    trained.versions.begin_canary(2, by="explorer", reason="a tenth")
    run(settings(trainer={"total_steps": 3}), Event())
    assert trained.versions.roll_back(2, by="explorer", reason="worse") == 1
    assert _states(trained) == ["retired", "champion", "rolled_back", "rejected"]
    run(settings(trainer={"total_steps": 2}), Event())
    newest = trained.versions.newest()
    assert (newest.version, newest.step, _parents(trained)[4]) == (4, 2, 1)
    assert trained.reports.imbalance() == []
    assert trained.reports.counts()[State.TRAINED] == 16


def test_what_was_learnt_of_a_batch_before_it_was_not_finite_is_not_kept(settings, ledger, monkeypatch):
    """The step before is made again, and the version is to the bit the one that a trainer makes that never met it."""
    chosen = settings(trainer={"total_steps": 2, "save_interval": 2})
    absurd = [sample(i, logprobs=np.full(len(sample(i).logprobs), -3e38, np.float32)) for i in (4, 5)]
    commit(ledger, [*(sample(i) for i in range(4)), *absurd, *(sample(i) for i in range(6, 12))])
    cut = []

    def last_first(rows, count, units_B, generator):
        """So that the absurd ones are in the second update."""
        cut.append(rows)
        return list(torch.randperm(rows, generator=generator).sort().values.flip(0).tensor_split(count))

    monkeypatch.setattr(learner, "mini_batches", last_first)
    run(chosen, Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8, State.DROPPED: 4}
    assert len(cut) == 4  # one step, the one that failed, and then both
    found = load_file(ledger.versions.newest().path / "actor" / "model.safetensors")
    alone = snapshot.load(chosen, None)
    for first in (0, 8):
        alone.step([sample(i) for i in range(first, first + 4)])
    weights = alone.actor.network.state_dict()
    assert found
    assert all(torch.equal(weights[name], each) for name, each in found.items())
