"""What the ledger knows of how a version has done: the same figures as by hand, on either database."""

import re
import statistics
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select, update

from tests.factories import exchange, experience, feedback, fill
from tuneloop.shared.evaluation.samples import SampleStatistics, Share
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.schema import experiences


def said(ledger: Ledger, reward: float | None = None, *, version: int = 1, tokens: int = 2, **but: Any) -> None:
    ids = {"completion_ids": bytes(4 * tokens), "logprobs": bytes(4 * tokens)}
    reply = experience(version_min=version, version_max=version, **ids)
    one = exchange(**{"experiences": (reply,), **but})
    ledger.recording.record([one])
    if reward is not None:
        ledger.recording.record([feedback(msg_id=one.msg_id, tenant=one.tenant, value=reward)])


def set_rewards(engine: Engine, rewards: list[float]) -> None:
    """Give the rows these rewards, which no rule with bounds would give them."""
    with engine.begin() as connection:
        rows = connection.execute(select(experiences.c.id)).scalars().all()
        for row, reward in zip(rows, rewards, strict=True):
            connection.execute(update(experiences).where(experiences.c.id == row).values(reward=reward))


def test_independent_rewards_give_their_mean_and_variance(ledger: Ledger) -> None:
    rewards = [0.0, 1.0, 1.0, 0.25, -3.0]
    for reward in rewards:
        said(ledger, reward)
    said(ledger)
    reward = ledger.comparisons.figures(1, 0.0).reward
    assert reward[:2] == (5, 5)
    assert reward[2:4] == pytest.approx((statistics.mean(rewards), statistics.variance(rewards)))


def test_the_largest_rewards_there_can_be_are_no_obstacle(ledger: Ledger, engine: Engine) -> None:
    for _ in range(3):
        said(ledger, 1.0)
    set_rewards(engine, [9e299, -9e299, 0.0])
    assert ledger.comparisons.figures(1, 0.0).reward[:4] == pytest.approx((3, 3, 0.0, 1e200))


def test_rewards_of_one_user_task_or_run_are_one_unit(ledger: Ledger) -> None:
    for labels in ({"user": "ann"}, {"task_id": "t"}, {"task_id": None, "run_id": "r"}):
        for reward in (0.0, 1.0):
            said(ledger, reward, **labels)
            said(ledger, reward, tenant="other", **labels)
    assert ledger.comparisons.figures(1, 0.0).reward[:3] == (12, 6, 0.5)


def test_only_replies_of_this_version_alone_since_then_count(ledger: Ledger) -> None:
    said(ledger, 1.0, received_at=99.0)
    said(ledger, 0.5, received_at=100.0)
    said(ledger, 1.0, received_at=100.0, version=2)
    said(ledger, 1.0, received_at=100.0, experiences=(experience(version_min=0, version_max=1),))
    said(ledger, 1.0, received_at=100.0, experiences=(experience(version_min=1, version_max=2),))
    figures = ledger.comparisons.figures(1, 100.0)
    assert figures.reward == SampleStatistics(1, 1, 0.5, 0.0)
    assert figures.length.replies == 1


def test_length_and_latency_are_those_of_replies(ledger: Ledger) -> None:
    for tokens, seconds in ((10, 1.0), (30, 2.0), (0, 0.5)):
        said(ledger, tokens=tokens, latency_s=seconds)
    figures = ledger.comparisons.figures(1, 0.0)
    assert figures.length == pytest.approx(SampleStatistics(3, 3, 40 / 3, 700 / 3))
    # The two that have tokens: the residuals of the ratio, by the mean of tokens.
    assert figures.latency == pytest.approx(SampleStatistics(2, 2, 3 / 40, (0.25**2 + 0.25**2) / 20**2))


def test_a_reply_that_was_corrected_once_it_was_trained_on_counts_once(ledger: Ledger, engine: Engine) -> None:
    one = exchange(experiences=(experience(version_min=1, version_max=1),))
    ledger.recording.record([one, feedback(msg_id=one.msg_id, value=1.0)])
    with engine.begin() as connection:
        row = dict(connection.execute(select(experiences)).mappings().one())
        connection.execute(insert(experiences).values(row | {"id": row["id"] + 1, "correction": 1, "reward": 0.0}))
    figures = ledger.comparisons.figures(1, 0.0)
    assert (figures.reward, figures.length.replies) == (SampleStatistics(1, 1, 1.0, 0.0), 1)


def test_refusals_are_counted_among_the_newest_replies(ledger: Ledger) -> None:
    for text in ("I cannot do that.", "Here you are.", "i CANNOT."):
        said(ledger, experiences=(experience(version_min=1, version_max=1, text=text),))
    patterns = [re.compile("i cannot", re.IGNORECASE), re.compile("unable")]
    assert ledger.comparisons.figures(1, 0.0, refusals=patterns).refusals == Share(2, 3)
    assert ledger.comparisons.figures(1, 0.0).refusals == Share(0, 0)


def test_what_came_before_the_rollout_is_not_read(ledger: Ledger, engine: Engine) -> None:
    fill(engine, 5000)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE experiences SET task_id = 'sum/' || id")
        connection.exec_driver_sql("ANALYZE")
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *heard: asked.append((heard[2], heard[3])))
    assert ledger.comparisons.figures(0, 4901.0, refusals=[re.compile("x")]).reward.replies == 100
    queries = [each for each in asked if each[0].startswith("SELECT")]
    assert len(queries) == 3
    explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    for query, values in queries:
        with engine.connect() as connection:
            plan = str(connection.exec_driver_sql(f"{explain} {query}", values).all())
        assert re.search(r"ix_experiences_(state_)?sampled_at\b", plan), plan
        assert re.search(r"sampled_at ?>", plan), plan
        assert "SCAN experiences" not in plan
        assert "Seq Scan on experiences" not in plan
