"""What is held out is never trained on, whatever the method, and otherwise treated as if it were."""

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects import sqlite

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import HELD_OUT, Exchange, State, pack_ids
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.ledger.recording.attestation import Mismatch
from tuneloop.shared.ledger.training.held_out import newest_held_out
from tuneloop.shared.settings.algorithm import AlgorithmType
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

DISTILL = {"teacher_url": "http://teacher:1/v1", "teacher_model": "m"}


def said(reward: float | None = 1.0, *, ledger: Ledger, out: bool = True, **but: Any) -> Exchange:
    """A reply in the ledger, held out or not; `but` belongs to its experience or its exchange."""
    its = {name: but.pop(name) for name in ("unsampled", "temperature", "completion_ids", "logprobs") if name in but}
    found = exchange(experiences=(experience(drop_reason=HELD_OUT if out else None, **its),), **but)
    ledger.recording.record([found])
    if reward is not None:
        ledger.recording.record([feedback(msg_id=found.msg_id, value=reward)])
    return found


def policies() -> list[BatchPolicy]:
    """Every way in which a method takes its batches."""
    found = set()
    groups, orders = ("none", "run", "task", "preference"), ("oldest", "freshest", "priority")
    modes = ("replies", "student")
    for kind, group_by, order, mode in itertools.product(get_args(AlgorithmType), groups, orders, modes):
        tree: dict[str, Any] = {
            "model": {"model_path": "/m"},
            "algorithm": {"algorithm_type": kind},
            "buffer": {"group_by": group_by, "order": order, "group_size": 2, "group_timeout": 1e-9},
        }
        if kind == "distill":
            tree["algorithm"]["distill"] = DISTILL | {"mode": mode}
        try:
            found.add(BatchPolicy.of(Settings.model_validate(tree)))
        except ValueError:
            continue  # the two do not go together
    return sorted(found, key=str)


def test_there_is_a_policy_for_each_way() -> None:
    assert {each.group_by for each in policies()} == {"none", "run", "task", "preference"}
    assert {each.any_reply for each in policies()} == {True, False}


@pytest.mark.parametrize("policy", policies(), ids=lambda each: f"{each.group_by}-{each.order}-{each.any_reply}")
def test_no_method_takes_what_is_held_out(ledger: Ledger, policy: BatchPolicy) -> None:
    taken, left = set(), set()
    for number in range(6):
        for out in (True, False):
            named = {"task_id": f"task-{number // 2}-{out}", "run_id": f"run-{number}"}
            reply = said(float(number), ledger=ledger, out=out, **named)
            (left if out else taken).add(reply.msg_id)
    for replies in (sorted(left), sorted(taken)):
        for one, other in itertools.pairwise(replies):
            preferred = {"kind": "preference", "value": None, "metric": "preference"}
            ledger.recording.record([feedback(msg_id=one, other_msg_id=other, **preferred)])
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    got = ledger.training.lease(epoch, 6, policy)
    assert {sample.msg_id for sample in got} == taken
    assert ledger.training.lease(epoch, 1, policy) == []
    assert {reply.id for reply in ledger.training.held_out(99)}.isdisjoint(sample.id for sample in got)
    assert len(ledger.training.held_out(99)) == 6
    assert ledger.reports.counts()[State.DROPPED] == 6
    assert ledger.reports.imbalance() == []


def rewards(ledger: Ledger, count: int = 99, **but: Any) -> list[float]:
    return [each.reward for each in ledger.training.held_out(count, **but)]


def test_the_newest_rewarded_samples_of_the_policy_are_replayed(ledger: Ledger) -> None:
    said(1.0, ledger=ledger, received_at=10.0)
    said(2.0, ledger=ledger, received_at=30.0, task_id="sums/1", temperature=0.5)
    said(3.0, ledger=ledger, received_at=20.0)
    said(4.0, ledger=ledger, out=False)
    said(5.0, ledger=ledger, unsampled="sampling:top_p")
    said(6.0, ledger=ledger, temperature=0.0)
    said(7.0, ledger=ledger, completion_ids=b"", logprobs=b"")
    said(None, ledger=ledger)
    cut_off = exchange(experiences=(experience(drop_reason="cut_off"),))
    ledger.recording.record([cut_off, feedback(msg_id=cut_off.msg_id, value=8.0)])
    assert rewards(ledger) == [2.0, 3.0, 1.0]
    assert rewards(ledger, 2) == [2.0, 3.0]
    assert rewards(ledger, temperature=1.0) == [3.0, 1.0]
    found = ledger.training.held_out(1)[0]
    assert (found.slice, found.temperature, found.tokens) == ("sums", 0.5, 5)
    assert np.array_equal(found.prompt_ids, np.frombuffer(pack_ids([1, 2, 3]), np.int32))
    assert found.logprobs.tolist() == [-0.5, -0.25]


def test_the_newest_are_found_by_an_index(engine: Engine) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("with so few rows PostgreSQL reads the whole table")
    query = newest_held_out(9, 1.0).compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    with engine.connect() as connection:
        plan = str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all())
    assert "ix_experiences_state_sampled_at" in plan


def test_a_reward_that_is_corrected_counts_as_corrected(ledger: Ledger) -> None:
    reply = said(1.0, ledger=ledger)
    ledger.recording.record([feedback(msg_id=reply.msg_id, value=0.25)])
    assert rewards(ledger) == [0.25]
    ledger.recording.record([feedback(msg_id=reply.msg_id, kind="retraction", value=None)])
    assert rewards(ledger) == []


@pytest.mark.parametrize(("now", "found"), [(100.0, []), (111.0, [-1.0])])
def test_silence_is_rewarded_as_where_it_is_trained_on(engine: Engine, now: float, found: Sequence[float]) -> None:
    ledger = Ledger(engine, rule=RewardRule(attribution_window=100.0, default=-1.0), clock=lambda: now)
    said(None, ledger=ledger, received_at=10.0)
    assert ledger.recording.commit("acme") == 0
    assert rewards(ledger) == found
    assert ledger.reports.counts()[State.DROPPED] == 1


@pytest.mark.parametrize("early", [True, False])
def test_what_an_engine_with_other_weights_said_is_not_replayed(ledger: Ledger, tmp_path: Any, early: bool) -> None:
    ledger.versions.ensure_base(tmp_path)
    found = Mismatch(engine=1, version=0, since=10.0, until=20.0, reason="off", figures={})
    if early:
        ledger.attestations.distrust(found)
    said(1.0, ledger=ledger, engine=1, received_at=15.0)
    said(2.0, ledger=ledger, engine=2, received_at=15.0)
    if not early:
        assert ledger.attestations.distrust(found) == (1, {})
    assert rewards(ledger) == [2.0]


def test_a_judge_sees_it_as_if_it_were_not_held_out(ledger: Ledger) -> None:
    silent, rewarded = said(None, ledger=ledger), said(1.0, ledger=ledger)
    states = {each.msg_id: each.state for each in ledger.judging.replies_after(0, limit=9)}
    assert states == {silent.msg_id: "recorded", rewarded.msg_id: "rewarded"}
    ids = {each.msg_id: each.id for each in ledger.judging.replies_after(0, limit=9)}
    assert ledger.judging.first_sampled_since(0.0) == ids[silent.msg_id]
