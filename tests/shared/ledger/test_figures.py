"""What an edited answer, a run's reward and a preference count as: the table of the docs, row by row."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.factories import exchange, experience, feedback
from tuneloop.shared.experience import Exchange, Kind
from tuneloop.shared.ledger.ledger import BatchRules, Ledger
from tuneloop.shared.settings.feedback import RewardRule

DOCS = Path(__file__).parents[3] / "docs"
_ROWS = (DOCS / "feedback.md").read_text().partition("### What feedback counts as")[2].partition("\n## ")[0]
TABLE = [row[1:-1].split("|") for row in _ROWS.splitlines() if row.startswith("|")][2:]


def said_of(ledger: Ledger, column: int) -> Sequence[Exchange]:
    names = {"task_id": "t", "run_id": "r"} if column == 2 else {}
    told = [exchange(experiences=(experience(text="ab"),), **names) for _ in range(min(column, 2))]
    preferred = {"other_msg_id": told[-1].msg_id, "metric": "preference"}
    event: dict[str, Any] = {
        1: {"kind": Kind.DEMONSTRATION, "metric": "demonstration", "value": None, "text": "ac"},
        2: {"kind": Kind.NUMBER, "value": 0.5, "msg_id": None, **names},
        3: {"kind": Kind.PREFERENCE, "value": None, **preferred},
    }[column]
    ledger.recording.record([*told, feedback(**{"msg_id": told[0].msg_id} | event)])
    return told


def leased(ledger: Ledger, policy: BatchRules) -> list[Any]:
    ledger.recording.commit("acme")
    epoch = ledger.training.take_epoch("trainer")
    return sorted(ledger.training.lease(epoch, 2, policy._replace(batch_timeout=0.0)), key=lambda each: each.id)


def in_words(rewards: Sequence[float | None], none: str) -> str:
    return "; ".join(none if each is None else f"{each:g}" for each in rewards) or none


def of_replies(ledger: Ledger, told: Sequence[Exchange]) -> str:
    views = [ledger.exchange_views.get("acme", each.msg_id) for each in told]
    return in_words([view.replies[0].reward for view in views if view is not None], "none")


def of_version(ledger: Ledger, told: Sequence[Exchange]) -> str:
    [listed] = ledger.reports.rewards()
    means = {
        listed.reward_sum / listed.rewarded,
        ledger.reward_history.newest(0, among=10).mean,
        ledger.comparisons.figures(0, 0.0).reward.mean,
    }
    return in_words(list(means), "none")


def learnt_by_sft(ledger: Ledger, told: Sequence[Exchange]) -> str:
    samples = leased(ledger, BatchRules(any_reply=True, edited=True))
    return {("ac",): "the edit", (None, None): "both replies"}[tuple(each.demonstration for each in samples)]


FIGURES: dict[str, Callable[[Ledger, Sequence[Exchange]], str]] = {
    "reward of a reply": of_replies,
    "mean of a version": of_version,
    "rewarded replies": lambda ledger, told: str(ledger.reward_history.newest(0, among=10).replies),
    "independent sources": lambda ledger, told: str(ledger.reward_history.newest(0, among=10).units),
    "learnt by `sft`": learnt_by_sft,
    "learnt by reward": lambda ledger, told: in_words([x.reward for x in leased(ledger, BatchRules())], "nothing"),
    "pairs": lambda ledger, told: str(len(leased(ledger, BatchRules(group_by="preference", any_reply=True))) // 2),
}


def test_the_table_has_all_figures() -> None:
    assert [next(name for name in FIGURES if row[0].startswith(name)) for row in TABLE] == list(FIGURES)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].partition(":")[0])
def test_each_figure_is_what_the_documentation_says(engine: Engine, row: list[str]) -> None:
    figure = next(FIGURES[name] for name in FIGURES if row[0].startswith(name))
    rule = RewardRule(weights={"reward": 1.0, "preference": 1.0})
    for column in range(1, 4):
        with engine.begin() as connection:
            for table in ("feedback", "experiences", "exchanges", "epochs"):
                connection.exec_driver_sql(f"DELETE FROM {table}")
        ledger = Ledger(engine, rule=rule)
        told = said_of(ledger, column)
        assert figure(ledger, told) == row[column], f"column {column}"
