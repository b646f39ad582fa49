"""Runs whose last call is rewarded, and the others are not; and under which rule a trainer corrects a reward."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event

from tests.doubles.clock import Clock
from tests.factories import exchange, experience, feedback, ids, published, trained
from tests.shared.ledger.reading import rows
from tuneloop.shared.experience import Sample, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.feedback import RewardRule
from tuneloop.shared.settings.settings import Settings

BY_RUN = BatchRules(group_by="run", by_result=True)
BY_TASK = BatchRules(group_by="task", group_size=2, by_result=True)


@pytest.fixture
def ledger(engine: Engine, clock: Clock) -> Ledger:
    return Ledger(engine, clock=clock)


@pytest.fixture
def take(ledger: Ledger) -> Callable[..., list[Sample]]:
    epoch = ledger.training.take_epoch("trainer")
    return lambda size, policy: ledger.training.lease(epoch, size, policy)


Take = Callable[..., list[Sample]]

#: Where the explorer writes at the same time.
ON_POSTGRESQL = pytest.mark.parametrize("place", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)


def run(ledger: Ledger, calls: int = 3, *, reward: float | None = 0.7, name: str = "1", **but: Any) -> list[str]:
    said = [exchange(task_id="t", run_id=name, **but) for _ in range(calls)]
    ledger.recording.record(said)
    if reward is not None:
        ledger.recording.record([feedback(msg_id=said[-1].msg_id, value=reward)])
        ledger.recording.commit("acme")
    return [each.msg_id for each in said]


def standings(engine: Engine) -> list[tuple[str, float | None]]:
    return [(row.state, row.reward) for row in rows(engine)]


def test_the_calls_before_a_rewarded_one_are_trained_on_with_its_reward(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    run(ledger)
    batch = take(1, BY_RUN)
    assert [(sample.id, sample.reward, sample.group_id) for sample in batch] == [(1, 0.7, 1), (2, 0.7, 1), (3, 0.7, 1)]
    ledger.training.register(1, ids(batch), step=1, publish=published)
    assert standings(engine) == [(State.TRAINED, 0.7)] * 3
    assert ledger.reports.audit() == []


def test_where_each_call_counts_for_itself_they_wait_for_their_own(ledger: Ledger, take: Take) -> None:
    run(ledger)
    assert take(1, BY_RUN._replace(by_result=False)) == []


def test_what_came_after_the_rewarded_call_is_waited_for_and_then_left_out(
    ledger: Ledger, engine: Engine, take: Take, clock: Clock
) -> None:
    run(ledger)
    ledger.recording.record([exchange(task_id="t", run_id="1")])
    assert take(1, BY_RUN) == []
    clock.now += 3601.0
    assert ids(take(1, BY_RUN)) == [1, 2, 3]
    assert standings(engine)[-1] == (State.RECORDED, None)


def test_the_runs_of_a_task_are_compared_by_their_results(ledger: Ledger, take: Take) -> None:
    run(ledger, 2, reward=1.0, name="1")
    run(ledger, 3, reward=None, name="2")
    assert take(1, BY_TASK) == [], "the other run has no result yet"
    run(ledger, 1, reward=0.0, name="2")
    assert [(sample.run_id, sample.reward, sample.group_id) for sample in take(1, BY_TASK)] == [
        *[("1", 1.0, 1)] * 2,
        *[("2", 0.0, 1)] * 4,
    ]


def test_when_the_result_is_taken_back_nothing_of_the_run_is_trained_on(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    *_, last = run(ledger)
    assert take(9, BY_RUN) == []  # gathered, but too few for a batch
    assert standings(engine) == [(State.COMMITTED, 0.7)] * 3
    ledger.recording.record([feedback(msg_id=last, kind="retraction", value=None)])
    assert take(1, BY_RUN) == []
    assert standings(engine) == [(State.RECORDED, None)] * 3
    ledger.recording.record([feedback(msg_id=last, value=0.2)])
    ledger.recording.commit("acme")
    assert [sample.reward for sample in take(1, BY_RUN)] == [0.2] * 3
    assert ledger.reports.audit() == []


def test_a_result_that_is_taken_back_while_it_is_leased_takes_all_back_with_the_lease(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    *_, last = run(ledger)
    assert len(take(1, BY_RUN)) == 3
    ledger.recording.record([feedback(msg_id=last, kind="retraction", value=None)])
    ledger.training.release(1)
    assert take(1, BY_RUN) == []
    assert standings(engine) == [(State.RECORDED, None)] * 3


def test_what_is_said_of_such_a_call_while_it_is_leased_counts_when_the_lease_ends(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    first, *_ = run(ledger)
    assert len(take(1, BY_RUN)) == 3
    ledger.recording.record([feedback(msg_id=first, value=0.1)])
    ledger.training.release(1)
    assert [row.reward for row in rows(engine)] == [0.1, 0.7, 0.7]
    assert [sample.reward for sample in take(1, BY_RUN)] == [0.1, 0.7, 0.7]


def test_calls_that_are_too_old_or_were_not_sampled_stay_where_they_are(
    ledger: Ledger, engine: Engine, take: Take
) -> None:
    for _ in range(3):
        trained(ledger)
    epoch = ledger.training.take_epoch("next")
    old = exchange(task_id="t", run_id="1", experiences=(experience(version_min=0, version_max=0),))
    greedy = exchange(
        task_id="t", run_id="1", experiences=(experience(version_min=3, version_max=3, unsampled="greedy"),)
    )
    ledger.recording.record([old, greedy])
    run(ledger, 2, experiences=(experience(version_min=3, version_max=3),))
    batch = ledger.training.lease(epoch, 1, BY_RUN._replace(max_staleness=1))
    assert ids(batch) == [6, 7]
    assert standings(engine)[3:5] == [(State.RECORDED, None)] * 2


@pytest.mark.parametrize("chosen", [0, 1])
def test_another_choice_of_the_result_is_no_call_before_it(
    ledger: Ledger, engine: Engine, take: Take, clock: Clock, chosen: int
) -> None:
    [first] = run(ledger, 1, reward=None)
    last = exchange(task_id="t", run_id="1", experiences=(experience(choice=0), experience(choice=1)))
    ledger.recording.record([last, feedback(msg_id=last.msg_id, choice=chosen)])
    ledger.recording.commit("acme")
    assert take(1, BY_RUN) == [], "the other choice may yet be rewarded"
    clock.now += 3601.0
    assert [(sample.msg_id, sample.choice) for sample in take(1, BY_RUN)] == [(first, 0), (last.msg_id, chosen)]


def test_a_repeat_of_an_earlier_call_is_no_result(engine: Engine, clock: Clock) -> None:
    ledger = Ledger(engine, clock=clock, compensate_late=True)
    epoch = ledger.training.take_epoch("trainer")
    first, _ = run(ledger, 2)
    batch = ledger.training.lease(epoch, 1, BY_RUN)
    run(ledger, 2, reward=None)  # the run goes on while it is trained on
    ledger.training.register(epoch, ids(batch), step=1, publish=published)
    ledger.recording.record([feedback(msg_id=first, value=-1.0)])
    ledger.recording.commit("acme")
    assert ledger.training.lease(epoch, 1, BY_RUN) == []
    clock.now += 3601.0
    assert [(sample.msg_id, sample.reward) for sample in ledger.training.lease(epoch, 1, BY_RUN)] == [(first, -1.0)]


def test_another_trainer_sees_it_its_own_way(ledger: Ledger, engine: Engine, take: Take) -> None:
    run(ledger)
    assert take(9, BY_RUN) == []
    assert ids(ledger.training.lease(ledger.training.take_epoch("another"), 1, BatchRules())) == [3]
    assert standings(engine)[:2] == [(State.RECORDED, None)] * 2


def between(engine: Engine, word: str, act: Callable[[], object]) -> None:
    waiting = [act]

    @event.listens_for(engine, "before_cursor_execute")
    def _before(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if waiting and word in sql:
            waiting.pop()()


@ON_POSTGRESQL
@pytest.mark.parametrize("what", ["retracted", "deleted", "rewarded"])
def test_what_happens_while_a_run_is_gathered_leaves_it_for_the_next_look(
    engine: Engine, clock: Clock, what: str
) -> None:
    ledger = Ledger(engine, clock=clock)
    epoch = ledger.training.take_epoch("trainer")
    first, _, last = run(ledger)
    acts = {
        "retracted": lambda: ledger.recording.record([feedback(msg_id=last, kind="retraction", value=None)]),
        "deleted": lambda: ledger.stored.delete("acme", last),
        "rewarded": lambda: ledger.recording.record([feedback(msg_id=first, value=-0.5)]),
    }
    between(engine, "ORDER BY experiences.id FOR UPDATE", acts[what])
    assert ledger.training.lease(epoch, 1, BY_RUN) == []
    assert ledger.reports.audit() == []
    ledger.recording.commit("acme")
    if what == "rewarded":
        assert [sample.reward for sample in ledger.training.lease(epoch, 1, BY_RUN)] == [-0.5, 0.7, 0.7]
    else:
        assert ledger.training.lease(epoch, 1, BY_RUN) == []
        assert ledger.reports.counts()[State.COMMITTED] == 0


@ON_POSTGRESQL
def test_a_reward_of_its_own_that_comes_while_a_group_falls_apart_stays(engine: Engine, clock: Clock) -> None:
    ledger = Ledger(engine, clock=clock)
    epoch = ledger.training.take_epoch("trainer")
    first, _, last = run(ledger)
    assert ledger.training.lease(epoch, 9, BY_RUN) == []
    ledger.recording.record([feedback(msg_id=last, kind="retraction", value=None)])
    between(
        engine,
        "ORDER BY experiences.id FOR UPDATE",
        lambda: ledger.recording.record([feedback(msg_id=first, value=-0.5)]),
    )
    ledger.training.lease(epoch, 9, BY_RUN)
    assert [row.reward for row in rows(engine)] == [-0.5, None, None]


@pytest.mark.parametrize(
    ("algorithm", "by_result"),
    [
        ({}, False),
        ({"credit": "discounted"}, True),
        ({"credit": "trajectory"}, True),
        ({"algorithm_type": "multi_step_grpo"}, True),
    ],
)
def test_credit_and_method_say_whether_the_last_call_speaks_for_its_run(
    algorithm: dict[str, str], by_result: bool, tmp_path: Any
) -> None:
    settings = Settings(model={"model_path": tmp_path}, algorithm=algorithm, buffer={"group_by": "task"})
    assert BatchRules.of(settings).by_result is by_result


# The rule of a correction.


@pytest.mark.parametrize("end", ["released", "trained"])
def test_a_trainer_corrects_a_reward_under_the_rule_that_made_it_whatever_its_settings_say(
    engine: Engine, end: str
) -> None:
    explorer = Ledger(engine, rule=RewardRule(weights={"tone": 1.0}))
    trainer = Ledger(engine, compensate_late=True)
    said = exchange()
    explorer.recording.record([said, feedback(msg_id=said.msg_id, metric="tone", value=0.7)])
    explorer.recording.commit("acme")
    epoch = trainer.training.take_epoch("trainer")
    batch = trainer.training.lease(epoch, 1, BatchRules())
    explorer.recording.record([feedback(msg_id=said.msg_id, metric="tone", value=0.9, received_at=1e9)])
    if end == "released":
        trainer.training.release(epoch)
        assert standings(engine) == [(State.COMMITTED, 0.9)]
    else:
        trainer.training.register(epoch, ids(batch), step=1, publish=published)
        assert standings(engine) == [(State.TRAINED, 0.7), (State.REWARDED, 0.9)]
    assert len({row.reward_rule for row in rows(engine)}) == 1
