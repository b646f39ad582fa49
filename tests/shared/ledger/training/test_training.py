import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from tests.doubles.clock import Clock
from tests.factories import committed, exchange, experience, feedback, fill, ids, leased, published, trained
from tests.shared.ledger.reading import rows
from tuneloop.shared.errors import LedgerError, StaleEpoch
from tuneloop.shared.experience import State, pack_ids, pack_logprobs
from tuneloop.shared.ledger.ledger import LEASE_S, BatchRules, Ledger
from tuneloop.shared.ledger.storage import database

#: More than one statement of ours has parameters; the soak has more than either database would take in one.
MANY = pytest.mark.parametrize("count", [10_500, pytest.param(66_000, marks=pytest.mark.soak)])


def only(**counts: int) -> dict[State, int]:
    return {state: counts.get(state, 0) for state in State}


def never(version: int) -> tuple[Path, str]:
    raise AssertionError(f"version {version} must not be published")


def test_a_sample_is_what_was_recorded(engine: Engine) -> None:
    said = experience(
        prompt_ids=pack_ids([7, 8]),
        completion_ids=pack_ids([9]),
        logprobs=pack_logprobs([-0.125]),
        version_min=1,
        version_max=2,
        temperature=0.5,
    )
    clocked = Ledger(engine, clock=lambda: 50.0)
    told = exchange(task_id="task", run_id="run", experiences=(said,))
    clocked.recording.record([told, feedback(msg_id=told.msg_id, value=0.75, received_at=40.0)])
    clocked.recording.commit("acme")
    [sample] = clocked.training.lease(clocked.training.take_epoch("trainer"), 1, BatchRules())
    assert sample.prompt_ids.tolist() == [7, 8]
    assert sample.completion_ids.tolist() == [9]
    assert sample.logprobs.tolist() == [-0.125]
    assert (sample.prompt_ids.dtype, sample.logprobs.dtype) == (np.int32, np.float32)
    assert (sample.version_min, sample.version_max, sample.temperature) == (1, 2, 0.5)
    assert (sample.task_id, sample.run_id) == ("task", "run")
    assert (sample.reward, sample.rewarded_at, sample.committed_at) == (0.75, 40.0, 50.0)


def test_only_full_batches_are_leased(ledger: Ledger) -> None:
    committed(ledger, 3)
    epoch = ledger.training.take_epoch("trainer")
    assert ledger.training.lease(epoch, 4, BatchRules()) == []
    assert ledger.reports.counts() == only(committed=3)
    assert len(ledger.training.lease(epoch, 3, BatchRules())) == 3
    assert ledger.training.lease(epoch, 1, BatchRules()) == []


def test_a_lease_names_its_epoch_and_its_end_and_can_be_extended(ledger: Ledger, engine: Engine) -> None:
    committed(ledger, 1)
    early, soon, late = (Ledger(engine, clock=lambda now=now: now) for now in (1000.0, 1001.0, 1001.0 + LEASE_S / 2))
    epoch = early.training.take_epoch("trainer")
    early.training.lease(epoch, 1, BatchRules())
    assert [(row.lease_epoch, row.lease_until) for row in rows(engine)] == [(epoch, 1000.0 + LEASE_S)]
    soon.training.extend(epoch)
    assert [row.lease_until for row in rows(engine)] == [1000.0 + LEASE_S]
    late.training.extend(epoch)
    assert [row.lease_until for row in rows(engine)] == [1001.0 + 1.5 * LEASE_S]


def test_a_released_lease_is_committed_again(ledger: Ledger) -> None:
    epoch, samples = leased(ledger, 2)
    ledger.training.release(epoch)
    assert ledger.reports.counts() == only(committed=2)
    assert ids(ledger.training.lease(epoch, 2, BatchRules())) == ids(samples)


def test_a_new_epoch_ends_the_leases_of_older_ones(ledger: Ledger) -> None:
    _old, samples = leased(ledger, 2)
    new = ledger.training.take_epoch("successor")
    assert ledger.reports.counts() == only(committed=2)
    assert ids(ledger.training.lease(new, 2, BatchRules())) == ids(samples)


def test_a_rejected_version_makes_nothing_older(ledger: Ledger) -> None:
    ledger.versions.reject(trained(ledger), "worse")
    committed(ledger, 1)
    assert len(ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules(max_staleness=0))) == 1


def test_feedback_for_what_is_expired_is_noted_but_brings_it_not_back(ledger: Ledger, engine: Engine) -> None:
    trained(ledger)
    [said] = committed(ledger, 1)
    ledger.training.lease(ledger.training.take_epoch("trainer"), 1, BatchRules(max_staleness=0))
    ledger.recording.record([feedback(msg_id=said.msg_id, value=0.25)])
    assert [(row.state, row.reward) for row in rows(engine)][1:] == [("expired", 0.25)]


def test_the_leases_of_a_silent_trainer_end(engine: Engine, clock: Clock) -> None:
    ledger = Ledger(engine, ticks=clock)
    epoch, _samples = leased(ledger, 2)
    for _ in range(3):
        ledger.recording.end_silent_leases()
        assert ledger.reports.counts() == only(leased=2)
        clock.now += LEASE_S - 1
        ledger.training.extend(epoch)
    ledger.recording.end_silent_leases()
    clock.now += LEASE_S + 1
    ledger.recording.end_silent_leases()
    assert ledger.reports.counts() == only(committed=2)


@pytest.mark.parametrize("ahead", [-86400.0, 900.0, 86400.0])
def test_an_explorer_whose_clock_is_wrong_ends_no_lease(engine: Engine, ahead: float) -> None:
    trainer, explorer = Ledger(engine), Ledger(engine, clock=lambda: time.time() + ahead)
    epoch, samples = leased(trainer, 2)
    for _ in range(3):
        explorer.recording.commit("acme")
        trainer.training.extend(epoch)
    trainer.training.register(epoch, [each.id for each in samples], step=1, publish=published)
    assert trainer.reports.counts() == only(trained=2)


def test_a_stale_trainer_can_do_nothing(ledger: Ledger) -> None:
    old, samples = leased(ledger, 2)
    ledger.training.take_epoch("successor")
    with pytest.raises(StaleEpoch, match=f"holds epoch {old}, but epoch {old + 1} has taken over"):
        ledger.training.lease(old, 1, BatchRules())
    with pytest.raises(StaleEpoch):
        ledger.training.extend(old)
    with pytest.raises(StaleEpoch):
        ledger.training.drop(old, ids(samples), "bad")
    with pytest.raises(StaleEpoch):
        ledger.training.register(old, ids(samples), step=1, publish=never)
    ledger.training.release(old)
    assert ledger.reports.counts() == only(committed=2)
    assert ledger.versions.all() == []


def test_a_stale_release_leaves_the_successors_lease_alone(ledger: Ledger) -> None:
    old, _samples = leased(ledger, 2)
    ledger.training.lease(ledger.training.take_epoch("successor"), 2, BatchRules())
    ledger.training.release(old)
    assert ledger.reports.counts() == only(leased=2)


def test_a_dropped_experience_keeps_its_reason_and_its_reward(ledger: Ledger, engine: Engine) -> None:
    epoch, samples = leased(ledger, 2)
    ledger.training.drop(epoch, ids(samples)[:1], "too long")
    assert [(row.state, row.reason, row.reward) for row in rows(engine)] == [
        ("dropped", "too long", 1.0),
        ("leased", None, 1.0),
    ]


def test_a_dropped_experience_takes_the_correction_that_came_while_it_was_leased(
    ledger: Ledger, engine: Engine
) -> None:
    epoch, samples = leased(ledger, 2)
    ledger.recording.record([feedback(msg_id=each.msg_id, value=0.25, call_id="late") for each in rows(engine)])
    ledger.training.drop(epoch, ids(samples)[:1], "too long")
    assert [(row.state, row.reward) for row in rows(engine)] == [("dropped", 0.25), ("leased", 1.0)]


def test_registering_marks_what_was_trained(ledger: Ledger, engine: Engine) -> None:
    epoch, samples = leased(ledger, 3)
    version = ledger.training.register(epoch, ids(samples)[:2], step=7, publish=published)
    assert ledger.reports.counts() == only(trained=2, leased=1)
    assert [row.trained_version for row in rows(engine)] == [version, version, None]
    [found] = ledger.versions.all()
    assert (found.version, found.state, found.step, found.consumed) == (1, "candidate", 7, 2)
    assert (found.path, found.manifest_sha256) == published(1)
    assert (found.served_at, found.reason) == (None, None)
    assert ledger.reports.imbalance() == []


def test_when_publishing_fails_nothing_is_registered(ledger: Ledger) -> None:
    epoch, samples = leased(ledger, 2)

    def fail(_version: int) -> tuple[Path, str]:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        ledger.training.register(epoch, ids(samples), step=1, publish=fail)
    assert ledger.versions.all() == []
    assert ledger.reports.counts() == only(leased=2)
    assert ledger.training.register(epoch, ids(samples), step=1, publish=published) == 1


@pytest.mark.parametrize("at_once", [10_000, 2])
@pytest.mark.parametrize("wrong", [lambda ids: [*ids, 10**9], lambda ids: [*ids, ids[0]]])
def test_what_is_not_leased_cannot_be_trained_and_nothing_is_published(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, wrong: Any, at_once: int
) -> None:
    epoch, samples = leased(ledger, 2)
    monkeypatch.setattr(database, "_PARAMETERS", at_once)
    with pytest.raises(LedgerError, match="version 1 was trained on 3 experiences, 2 are leased"):
        ledger.training.register(epoch, wrong(ids(samples)), step=1, publish=never)
    assert ledger.versions.all() == []
    assert ledger.reports.counts() == only(leased=2)


def test_nothing_is_trained_twice(ledger: Ledger) -> None:
    epoch, samples = leased(ledger, 2)
    ledger.training.register(epoch, ids(samples), step=1, publish=published)
    with pytest.raises(LedgerError, match="0 are leased"):
        ledger.training.register(epoch, ids(samples), step=2, publish=never)


def test_version_numbers_grow_and_are_not_used_again(ledger: Ledger) -> None:
    ledger.versions.ensure_base(Path("/base"))
    first = trained(ledger)
    ledger.versions.reject(first, "worse")
    assert [first, trained(ledger), trained(ledger)] == [1, 2, 3]


@MANY
def test_more_experiences_than_a_statement_takes_are_one_verb(ledger: Ledger, engine: Engine, count: int) -> None:
    fill(engine, count)
    epoch = ledger.training.take_epoch("trainer")
    samples = ledger.training.lease(epoch, count, BatchRules())
    assert ids(samples) == list(range(1, count + 1))
    ledger.training.drop(epoch, ids(samples)[:1_000], "bad")
    ledger.training.register(epoch, ids(samples)[1_000:], step=1, publish=published)
    assert ledger.reports.counts() == only(dropped=1_000, trained=count - 1_000)
