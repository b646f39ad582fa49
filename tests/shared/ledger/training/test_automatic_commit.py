"""`buffer.commit: auto`: what is due is committed by itself, and what is trained on together is committed together."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text

from tests.doubles.clock import Clock
from tests.factories import exchange, experience, feedback, fill
from tuneloop.shared.experience import Kind, State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.ledger.storage.schema import experiences
from tuneloop.shared.ledger.training import automatic_commit
from tuneloop.shared.ledger.training.automatic_commit import AutomaticCommit
from tuneloop.shared.settings.feedback import RewardRule

ALONE = BatchRules(automatic=True)
RUN = ALONE._replace(group_by="run", group_timeout=900.0)
TASK = ALONE._replace(group_by="task", group_size=2, group_timeout=900.0)
PREFERENCE = ALONE._replace(group_by="preference", group_timeout=900.0)


@pytest.fixture
def ledger(engine: Engine, clock: Clock) -> Ledger:
    return Ledger(engine, rule=RewardRule(weights={"reward": 1.0, "preference": 1.0}), clock=clock)


Commit = Callable[..., list[str]]


@pytest.fixture
def commit(ledger: Ledger, engine: Engine, clock: Clock) -> Commit:
    def run(at: float, rules: BatchRules = ALONE) -> list[str]:
        clock.now = at
        # Nothing is in memory: each time it is another process.
        automatic, place = AutomaticCommit(ledger.transactions, ledger.rewards), None
        if automatic.is_due([rules.policy]):
            while automatic.reward_by_default():
                pass
            place = automatic.commit_due(rules).place
            while place is not None:
                place = automatic.commit_due(rules, place).place
        return committed(engine)

    return run


def committed(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        found = select(experiences.c.msg_id).where(experiences.c.state == State.COMMITTED).order_by(experiences.c.id)
        return list(connection.execute(found).scalars())


def reply(ledger: Ledger, name: str, at: float = 1000.0, **but: Any) -> str:
    ledger.recording.record([exchange(msg_id=name, received_at=at, **but)])
    return name


def rate(ledger: Ledger, name: str | None, at: float, value: float = 1.0, **but: Any) -> None:
    ledger.recording.record([feedback(msg_id=name, received_at=at, value=value, **but)])


def prefer(ledger: Ledger, better: str, worse: str, at: float) -> None:
    rate(ledger, better, at, value=None, kind=Kind.PREFERENCE, metric="preference", other_msg_id=worse)  # type: ignore[arg-type]


class TestSingleRows:
    def test_a_row_is_committed_when_its_last_feedback_is_30_s_old(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a")
        reply(ledger, "b")
        rate(ledger, "a", 1010.0)
        assert commit(1039.0) == []
        rate(ledger, "a", 1039.0, value=0.0)  # somebody changes his mind
        assert commit(1068.0) == []
        assert commit(1069.0) == ["a"]

    @pytest.mark.parametrize("how", ["comment", "repetition", "of_its_run", "preference"])
    def test_every_event_about_it_counts(self, ledger: Ledger, commit: Commit, how: str) -> None:
        reply(ledger, "a", task_id="t", run_id="r")
        reply(ledger, "b")
        rate(ledger, "a", 1010.0, source="ann", event_id="first")
        match how:
            case "comment":
                rate(ledger, "a", 1030.0, value=None, kind=Kind.COMMENT, metric="comment", text="so so")  # type: ignore[arg-type]
            case "repetition":
                rate(ledger, "a", 1030.0, source="ann", event_id="again")
            case "of_its_run":
                rate(ledger, None, 1030.0, task_id="t", run_id="r")
            case _:
                prefer(ledger, "b", "a", 1030.0)
        assert "a" not in commit(1059.0)
        assert "a" in commit(1060.0)

    def test_feedback_that_goes_on_holds_it_for_five_minutes(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a")
        for number in range(30):
            rate(ledger, "a", 1010.0 + 10 * number, value=number % 2, source=f"user-{number}")
        assert commit(1309.0) == []
        assert commit(1310.0) == ["a"]

    def test_comments_that_go_on_hold_it_for_five_minutes(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a")
        rate(ledger, "a", 1010.0)
        for number in range(29):
            said: dict[str, Any] = {"kind": Kind.COMMENT, "metric": "comment", "text": "hm", "source": str(number)}
            rate(ledger, "a", 1020.0 + 10 * number, value=None, **said)  # type: ignore[arg-type]
        assert commit(1309.0) == []
        assert commit(1310.0) == ["a"]

    def test_feedback_that_came_before_the_reply_counts_from_its_own_time(self, ledger: Ledger, commit: Commit) -> None:
        rate(ledger, "a", 1001.0)
        reply(ledger, "a", 1000.0)
        assert commit(1031.0) == ["a"]

    def test_what_lost_its_reward_stays(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a")
        rate(ledger, "a", 1010.0, source="ann")
        rate(ledger, "a", 1020.0, value=None, kind=Kind.RETRACTION, source="ann")  # type: ignore[arg-type]
        assert commit(5000.0) == []

    def test_commit_hurries_it(self, ledger: Ledger, engine: Engine, clock: Clock) -> None:
        reply(ledger, "a")
        rate(ledger, "a", 1010.0)
        clock.now = 1011.0
        assert ledger.recording.commit("acme") == 1
        assert committed(engine) == ["a"]

    def test_every_tenant_s_rows_are_committed_and_those_of_one_policy_alone(
        self, ledger: Ledger, commit: Commit
    ) -> None:
        for name, tenant in (("a", "acme"), ("b", "zoo")):
            reply(ledger, name, tenant=tenant)
            rate(ledger, name, 1010.0, tenant=tenant)
        assert commit(2000.0, ALONE._replace(policy=1)) == []
        assert commit(2000.0) == ["a", "b"]

    def test_what_the_method_does_not_take_is_committed_as_commit_does(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a", task_id="t", run_id="r", experiences=(experience(unsampled="sampling:top_p"),))
        rate(ledger, "a", 1010.0)
        assert commit(1040.0, RUN) == ["a"]

    def test_the_default_reward_is_committed_when_its_window_has_closed(self, engine: Engine, clock: Clock) -> None:
        rule = RewardRule(default=0.5, attribution_window=600.0)
        ledger = Ledger(engine, rule=rule, clock=clock)
        automatic = AutomaticCommit(ledger.transactions, ledger.rewards)
        reply(ledger, "a")
        clock.now = 1600.0
        assert not automatic.is_due([0])
        clock.now = 1601.0
        assert automatic.is_due([0])
        assert automatic.reward_by_default() == 1
        clock.now = 1631.0
        assert automatic.commit_due(ALONE).committed == 1
        with engine.connect() as connection:
            row = connection.execute(select(experiences)).one()
        assert (row.reward, row.rewarded_at, row.committed_at) == (0.5, 1600.0, 1631.0)


class TestGroups:
    def test_a_run_is_committed_as_a_whole(self, ledger: Ledger, commit: Commit) -> None:
        for name in ("a", "b"):
            reply(ledger, name, task_id="t", run_id="r")
        rate(ledger, "a", 1010.0)
        assert commit(1800.0, RUN) == []
        rate(ledger, None, 1800.0, value=0.0, task_id="t", run_id="r")
        assert commit(1829.0, RUN) == []
        assert commit(1830.0, RUN) == ["a", "b"]

    def test_a_run_that_lacks_feedback_goes_at_its_timeout(self, ledger: Ledger, commit: Commit) -> None:
        for name in ("a", "b"):
            reply(ledger, name, task_id="t", run_id="r")
        rate(ledger, "a", 1010.0)
        rate(ledger, "a", 1500.0, value=0.0)
        assert commit(1909.0, RUN) == []
        assert commit(1910.0, RUN) == ["a"]

    def test_the_trainer_does_not_wait_as_long_again(self, ledger: Ledger, commit: Commit, clock: Clock) -> None:
        for name in ("a", "b"):
            reply(ledger, name, task_id="t", run_id="r")
        rate(ledger, "a", 1010.0)
        assert commit(1910.0, RUN) == ["a"]
        epoch = ledger.training.take_epoch("trainer")
        assert ledger.training.lease(epoch, 1, RUN._replace(automatic=False)) == []
        assert [each.msg_id for each in ledger.training.lease(epoch, 1, RUN)] == ["a"]

    def test_only_a_run_s_last_call_needs_feedback_where_its_result_counts(
        self, ledger: Ledger, commit: Commit
    ) -> None:
        for at, name in enumerate(("a", "b", "c")):
            reply(ledger, name, 1000.0 + at, task_id="t", run_id="r")
        by_result = RUN._replace(by_result=True)
        rate(ledger, "b", 1010.0)
        assert commit(1100.0, by_result) == []  # the call after it may still be rated
        rate(ledger, "c", 1110.0)
        assert commit(1140.0, by_result) == ["b", "c"]

    def test_a_task_s_runs_are_committed_together_when_they_are_enough(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a", task_id="t", run_id="1")
        rate(ledger, "a", 1010.0)
        assert commit(1500.0, TASK) == []
        reply(ledger, "b", 1490.0, task_id="t", run_id="2")
        assert commit(1500.0, TASK) == []
        rate(ledger, "b", 1500.0)
        assert commit(1529.0, TASK) == []
        assert commit(1530.0, TASK) == ["a", "b"]

    def test_both_replies_of_a_preference_are_committed_together(self, ledger: Ledger, commit: Commit) -> None:
        reply(ledger, "a")
        prefer(ledger, "a", "b", 1010.0)
        assert commit(1100.0, PREFERENCE) == []
        reply(ledger, "b", 1005.0)
        assert commit(1100.0, PREFERENCE) == ["a", "b"]

    def test_a_preference_whose_other_reply_never_comes_goes_at_its_timeout(
        self, ledger: Ledger, commit: Commit
    ) -> None:
        reply(ledger, "a")
        prefer(ledger, "a", "b", 1010.0)
        assert commit(1909.0, PREFERENCE) == []
        assert commit(1910.0, PREFERENCE) == ["a"]

    def test_a_reply_that_goes_on_being_compared_holds_the_other(self, ledger: Ledger, commit: Commit) -> None:
        for name in ("a", "b", "c"):
            reply(ledger, name)
        prefer(ledger, "a", "b", 1010.0)
        prefer(ledger, "c", "b", 1030.0)
        assert commit(1040.0, PREFERENCE) == []
        assert commit(1060.0, PREFERENCE) == ["a", "b", "c"]

    def test_rows_whose_groups_wait_do_not_hold_up_others(
        self, ledger: Ledger, commit: Commit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(automatic_commit, "PAGE", 2)
        for number in range(5):
            for name in ("rated", "open"):
                reply(ledger, f"{name}-{number}", task_id="t", run_id=str(number))
            rate(ledger, f"rated-{number}", 1010.0 + number)
        reply(ledger, "done", task_id="t", run_id="done")
        rate(ledger, "done", 1020.0)
        assert commit(1060.0, RUN) == ["done"]


def test_a_look_takes_a_page_and_uses_the_index(engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is recorded, committed or trained: 20 000 rows, a few of which are due."""
    ledger = Ledger(engine, clock=clock)
    fill(engine, 20_000)
    with engine.begin() as connection:
        connection.execute(text("UPDATE experiences SET state = 'rewarded', committed_at = NULL WHERE id % 100 = 0"))
    connection = engine.raw_connection()  # in no transaction
    connection.cursor().execute("VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "VACUUM")
    connection.close()
    clock.now = 10_000.0
    asked: list[str] = []
    plan = "EXPLAIN " if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "FROM experiences" in statement and not statement.startswith("EXPLAIN"):
            other = connection.connection.cursor()
            other.execute(plan + statement, parameters)
            asked.append(f"{statement}\n{other.fetchall()}")

    monkeypatch.setattr(automatic_commit, "PAGE", 100)
    automatic, place, found = AutomaticCommit(ledger.transactions, ledger.rewards), None, list[int]()
    event.listen(engine, "before_cursor_execute", explain)
    try:
        assert automatic.is_due([0])
        while True:
            committed_now, place = automatic.commit_due(ALONE, place)
            found.append(committed_now)
            if place is None:
                break
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    assert found == [100, 100, 0]
    assert asked
    for each in asked:
        assert "ix_experiences_rewarded" in each, each
        assert "SCAN feedback" not in each, each
