"""What the page and the gauges ask costs the same however large the ledger is, and the counts are those of the rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from tests.databases import engine_of, put_file
from tests.factories import committed, exchange, experience, feedback, fill, ids, leased, published, rewarded, trained
from tests.shared.ledger.test_races import at_once
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.ledger import BatchRules, Ledger


def steps(engine: Engine, ask: Callable[[], object]) -> int:
    """How many hundreds of instructions SQLite takes for a question."""
    driver: Any = engine.raw_connection().driver_connection  # the pool has no other
    taken: list[int] = []
    driver.set_progress_handler(lambda: taken.append(1), 100)
    ask()
    return len(taken)


@pytest.mark.parametrize("change", ["state = 'dropped', reason = ''", "priority = 1"])
def test_the_questions_of_the_page_and_the_gauges_cost_the_same_with_more_rows(tmp_path: Path, change: str) -> None:
    found: list[dict[str, int]] = []
    for count in (6_000, 24_000):  # more than the window
        put_file(url := f"sqlite:///{tmp_path}/{count}.db")
        engine = engine_of(url)
        fill(engine, count)
        ledger = Ledger(engine)
        trained(ledger)  # the oldest
        with engine.begin() as db:
            db.exec_driver_sql(f"UPDATE experiences SET {change} WHERE id > 1")
        questions: dict[str, Callable[[], object]] = {
            "counts": ledger.reports.counts,
            "a tenant's": lambda ledger=ledger: ledger.reports.counts("acme"),
            "facts": lambda ledger=ledger: ledger.reports.facts(BatchRules(), batch=8),
            "rewards": ledger.reports.rewards,
            "imbalance": ledger.reports.imbalance,
            "newest commit": ledger.reports.newest_commit,
            "its newest commit": lambda ledger=ledger: ledger.reports.newest_commit("acme"),
            "claimable": lambda ledger=ledger: ledger.reports.claimable(BatchRules(max_staleness=1), "acme"),
            "newest names": lambda ledger=ledger: ledger.reports.newest_names(among=50),
        }
        found.append({name: steps(engine, ask) for name, ask in questions.items()})
        engine.dispose()
    assert {name: each for name, each in found[1].items() if each > 2 * found[0][name] + 5} == {}


def test_the_facts_are_read_in_one_transaction_and_the_alarms_in_another(ledger: Ledger, engine: Engine) -> None:
    begun: list[object] = []
    event.listen(engine, "begin", begun.append)
    assert ledger.reports.facts(BatchRules(), drops=5, batch=1).states == {}
    assert len(begun) <= 2


def test_the_counts_are_those_of_the_rows_whatever_happens_to_them(ledger: Ledger) -> None:
    trained(ledger, 3)
    epoch, samples = leased(ledger, 4)
    ledger.training.register(epoch, ids(samples)[:2], step=2, publish=published)
    ledger.training.take_epoch("another")
    rewarded(ledger, 2, tenant="globex")
    said = exchange(tenant="globex", experiences=(experience(drop_reason="empty"), experience(choice=1)))
    ledger.recording.record([said, said, feedback(msg_id=said.msg_id, tenant="globex", value=0.5, choice=1)])
    ledger.recording.record([feedback(msg_id=said.msg_id, tenant="globex", value=-1.0, choice=1)])
    committed(ledger, 2)
    assert ledger.reports.counts("globex") | {State.REWARDED: 3, State.DROPPED: 1} == ledger.reports.counts("globex")
    [base, *_] = ledger.reports.rewards()
    assert (base.version, base.replies, base.rewarded, base.reward_sum) == (0, 13, 12, 10.0)
    before = ledger.reports.counts()
    for _ in range(2):
        ledger.reports.fold_counts()
        assert ledger.reports.counts() == before
    assert ledger.reports.audit() == []
    ledger.retention.purge({State.TRAINED: -1e12, State.REWARDED: -1e12, State.DROPPED: -1e12})
    ledger.retention.erase("acme", "nobody")
    ledger.reports.fold_counts()
    assert ledger.reports.audit() == []
    assert {state for state, count in ledger.reports.counts().items() if count} == {State.COMMITTED}


def test_rows_that_were_changed_behind_the_counts_are_found(ledger: Ledger, engine: Engine) -> None:
    trained(ledger, 2)
    with engine.execution_options(sqlite_begin="IMMEDIATE").begin() as connection:
        connection.execute(text("UPDATE experience_counts SET rows = rows + 1 WHERE state = 'trained'"))
    assert any("trained" in each and "counted" in each for each in ledger.reports.audit())


def test_processes_that_record_at_once_are_all_counted(engine: Engine) -> None:
    ledgers = [Ledger(engine) for _ in range(4)]

    def record(ledger: Ledger) -> None:
        for _ in range(10):
            rewarded(ledger, 3)
            ledger.reports.fold_counts()

    assert at_once(*[lambda ledger=each: record(ledger) for each in ledgers]) == [None] * 4
    assert ledgers[0].reports.counts()[State.REWARDED] == 120
    assert ledgers[0].reports.audit() == []
