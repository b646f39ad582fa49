"""Somebody chooses between two answers."""

import json
from typing import Any

import pytest

from tests.doubles.engine import MODEL, EngineDouble
from tests.explorer.running import RunningExplorer
from tuneloop.runner import HumanPreferenceCollector, ServiceRefused
from tuneloop.runner.collection.preference_pairs import arrange

ASKED = [{"role": "user", "content": "3+4="}]
NEW = "Seven, of course."


@pytest.fixture
def answering(trying: RunningExplorer, doubles: list[EngineDouble]) -> RunningExplorer:
    """Version 1 says something else than version 0."""
    for each in doubles:
        each.says["global_step_1"] = NEW
    return trying


def preferences(explorer: RunningExplorer) -> list[tuple[str, str, str]]:
    explorer.until_flushed()
    return explorer.rows("SELECT msg_id, other_msg_id, source FROM feedback WHERE kind = 'preference'")


def test_the_order_is_blind_random_and_the_same_again() -> None:
    a, b = ("A", "id-a", "0"), ("B", "id-b", "1")
    pairs = [arrange([{"role": "user", "content": str(at)}], a, b) for at in range(100)]
    assert 30 < sum(each.texts == ("A", "B") for each in pairs) < 70
    assert all((each.texts == ("A", "B")) == (each.ids == ("id-a", "id-b")) for each in pairs)
    assert pairs == [arrange([{"role": "user", "content": str(at)}], a, b) for at in range(100)]
    assert pairs != [arrange([{"role": "user", "content": str(at)}], a, b, seed=1) for at in range(100)]
    shown = json.dumps(pairs[0].page)
    assert "id-a" not in shown
    assert "versions" not in shown


@pytest.mark.parametrize("choice", ["left", "right"])
def test_a_choice_is_a_preference_of_the_service(answering: RunningExplorer, choice: Any) -> None:
    collector = HumanPreferenceCollector(answering.url, source="ann")
    pair = collector.sample(ASKED, MODEL, (0, 1), max_tokens=12)
    assert NEW in pair.texts
    assert pair.versions is not None
    assert sorted(pair.versions) == ["0", "1"]
    said = collector.record(pair, choice)
    again = collector.record(pair, choice)
    collector.close()
    assert said == again
    assert said.sent
    assert pair.ids is not None
    better = 0 if choice == "left" else 1
    assert preferences(answering) == [(pair.ids[better], pair.ids[1 - better], "ann")]


def test_ties_and_skips_are_not_sent(answering: RunningExplorer) -> None:
    collector = HumanPreferenceCollector(answering.url)
    pair = collector.sample(ASKED, MODEL, (0, 1), max_tokens=12)
    assert [collector.record(pair, choice).sent for choice in ("tie", "skip")] == [False, False]
    with pytest.raises(ValueError, match="choice: 'both'"):
        collector.record(pair, "both")  # type: ignore[arg-type]
    collector.close()
    assert preferences(answering) == []


def test_stored_replies_are_a_pair_if_they_answer_one_question(answering: RunningExplorer) -> None:
    ids = [answering.chat(model=f"{MODEL}@{version}").json()["id"] for version in (0, 1)]
    other = answering.chat(messages=[{"role": "user", "content": "9+9="}]).json()["id"]
    answering.until_flushed()
    collector = HumanPreferenceCollector(answering.url)
    assert sorted(collector.pair_of(*ids).ids or ()) == sorted(ids)
    with pytest.raises(ServiceRefused, match="the same question"):
        collector.pair_of(ids[0], other)
    with pytest.raises(ServiceRefused, match="chatcmpl-nothing"):
        collector.pair_of(ids[0], "chatcmpl-nothing")
    collector.close()


def test_long_conversations_are_compared_whole(answering: RunningExplorer) -> None:
    turns = [{"role": ("user", "assistant")[at % 2], "content": str(at)} for at in range(102)]
    ends = [[*turns, {"role": "user", "content": end}] for end in ("3+4=", "3+4=", "9+9=")]
    ids = [answering.chat(messages=each).json()["id"] for each in ends]
    answering.until_flushed()
    collector = HumanPreferenceCollector(answering.url)
    assert list(collector.pair_of(ids[0], ids[1]).messages) == ends[0]
    with pytest.raises(ServiceRefused, match="the same question"):
        collector.pair_of(ids[0], ids[2])
    collector.close()
