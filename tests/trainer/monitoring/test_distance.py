"""How far the policy has come from the base model, where the method does not look at that."""

import pytest

from tests.trainer.factories import sample
from tuneloop.shared.settings.versions import DriftSettings
from tuneloop.trainer.checkpoints import snapshot
from tuneloop.trainer.monitoring.drift import KL_BASE
from tuneloop.trainer.monitoring.monitors import Monitors, PolicyDivergence

BATCH = [sample(i) for i in range(8)]
LIVELY = {"kl_coef": 0.0, "mini_batches": 1, "optimizer": {"lr": 1e-2}}


@pytest.fixture
def learnt(settings, monkeypatch):
    """Settings, and a learner without a reference after two steps."""
    monkeypatch.setattr(DriftSettings, "kl_every", 2)
    chosen = settings(algorithm=LIVELY, monitor={"drift": {"kl": 1e-6, "baseline": 1, "window": 1}})
    learner = snapshot.load(chosen, None)
    for _ in range(2):
        learner.step(BATCH)
    assert learner.reference is None
    return chosen, learner


def test_it_is_measured_after_every_so_many_steps(learnt):
    chosen, learner = learnt
    measured = PolicyDivergence(chosen).measure(learner, BATCH)
    assert measured == {KL_BASE: pytest.approx(learner.distance(learner.actor.reference(chosen), BATCH))}
    assert measured[KL_BASE] > 1e-4
    learner.steps += 1
    assert PolicyDivergence(chosen).measure(learner, BATCH) == {}


def test_a_policy_that_goes_far_raises_the_alarm_though_its_loss_does_not_look_at_the_base_model(learnt, ledger):
    chosen, learner = learnt
    watch = Monitors(chosen, ledger)
    watch.begin(learner)
    told = watch.after_step(learner, {}, version=2, replies=BATCH)
    assert told["drift/kl"] == told[KL_BASE] > 0
    assert [alarm.name for alarm in ledger.alarms.all()] == ["kl"]
