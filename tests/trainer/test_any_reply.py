"""The methods that learn from any reply, from the ledger to a version."""

from threading import Event

import numpy as np
import pytest

from tests.trainer.factories import commit, points, sample
from tuneloop.shared.experience import Feedback, Kind, State
from tuneloop.shared.ledger.ledger import BatchRules
from tuneloop.trainer.loop import run


def _algorithm(kind, **but):
    return {"algorithm_type": kind, "optimizer": {"lr": 1e-3}, "mini_batches": 1} | but


def _reasons(ledger):
    return {drop.reason: drop.rows for drop in ledger.reports.facts(BatchRules(), drops=9).drops}


@pytest.mark.parametrize(("kind", "curve"), [("kto", "actor/kto_loss"), ("sft", "actor/sft_loss")])
def test_single_replies_become_a_version_without_a_critic(settings, ledger, kind, curve):
    commit(ledger, [sample(i, reward=1.0) for i in range(8)])
    chosen = settings(algorithm=_algorithm(kind), trainer={"total_steps": 2})
    run(chosen, Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 8}
    newest = ledger.versions.newest().path
    assert (newest / "actor").is_dir()
    assert not (newest / "critic").exists()
    assert len(points(chosen.tensorboard_dir / "trainer", curve)) == 2
    run(settings(algorithm=_algorithm(kind), trainer={"total_steps": 2}), Event())  # It can be gone on from.


def test_an_edited_answer_is_trained_on_in_the_place_of_its_reply(settings, ledger):
    bad = sample(0, reward=0.0)
    commit(ledger, [bad, *(sample(i, reward=0.0) for i in range(1, 4))])
    edits = [
        Feedback(
            event_id=f"d{i}",
            call_id="d",
            msg_id=f"m{i}",
            choice=None,
            tenant="t",
            received_at=3.0,
            kind=Kind.DEMONSTRATION,
            metric="demonstration",
            text=f"answer {i}",
        )
        for i in range(4)
    ]
    ledger.recording.record(edits)
    chosen = settings(algorithm=_algorithm("sft"), trainer={"total_steps": 1})
    run(chosen, Event())
    assert ledger.reports.counts()[State.TRAINED] == 4
    [(_, loss)] = points(chosen.tensorboard_dir / "trainer", "actor/sft_loss")
    assert loss > 0


def test_pairs_of_a_group_become_a_version_and_the_odd_one_says_why(settings, ledger):
    prompt = np.arange(60, 64, dtype=np.int32)
    rows = [
        sample(3 * task + n, task_id=f"task {task}", run_id=str(n), reward=reward, prompt_ids=prompt, temperature=1.0)
        for task in range(4)
        for n, reward in enumerate((0.0, 1.0, 0.5))
    ]
    commit(ledger, rows)
    buffer = {"group_by": "task", "group_size": 3, "train_batch_size": 8}
    chosen = settings(algorithm=_algorithm("dpo"), buffer=buffer, trainer={"total_steps": 1})
    run(chosen, Event())
    counts = ledger.reports.counts()
    assert (counts[State.TRAINED], counts[State.DROPPED]) == (8, 4)
    assert _reasons(ledger) == {"no pair: it is in the middle of an odd number of replies": 4}
    [(_, margin)] = points(chosen.tensorboard_dir / "trainer", "rewards/margins")
    assert margin == pytest.approx(0, abs=1e-4)
    assert ledger.reports.imbalance() == []


def test_the_two_replies_of_a_preference_become_a_pair(settings, ledger):
    prompt = np.arange(60, 64, dtype=np.int32)
    commit(ledger, [sample(i, reward=float(i % 2), prompt_ids=prompt, temperature=1.0) for i in range(4)])
    said = [
        Feedback(
            event_id=f"p{i}",
            call_id="p",
            msg_id=f"m{i}",
            choice=None,
            other_msg_id=f"m{i - 1}",
            tenant="t",
            received_at=3.0,
            kind=Kind.PREFERENCE,
            metric="preference",
        )
        for i in (1, 3)
    ]
    ledger.recording.record(said)
    chosen = settings(
        algorithm=_algorithm("dpo"),
        buffer={"group_by": "preference"},
        trainer={"total_steps": 1},
        reward={"weights": {"reward": 1, "preference": 1}},
    )
    run(chosen, Event())
    assert ledger.reports.counts() == dict.fromkeys(State, 0) | {State.TRAINED: 4}
