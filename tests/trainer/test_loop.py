"""The loop against a real ledger."""

from threading import Event

from tests.trainer.factories import commit, sample
from trainer.loop import run


def test_it_trains_and_publishes(settings, ledger):
    commit(ledger, [sample(i) for i in range(16)])
    run(settings(trainer={"total_steps": 3, "save_interval": 2}), Event())
    print(ledger.versions(), ledger.counts(), ledger.imbalance())
    assert 0
