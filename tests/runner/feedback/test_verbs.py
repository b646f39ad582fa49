"""What the verbs say on the wire, and what they refuse before it is taken."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tuneloop.explorer.feedback.events import parse_entries
from tuneloop.runner import Composite, Reply, WholeRun
from tuneloop.runner.feedback.verbs import Entry, FeedbackVerbs

A, B = "chatcmpl-a", "chatcmpl-b"


class Collected(FeedbackVerbs[list[Entry]]):
    _source = "app"

    def _take(self, entries: Sequence[Entry]) -> list[Entry]:
        return list(entries)


SAY = Collected()

SAID: list[tuple[Callable[[], list[Entry]], dict[str, Any]]] = [
    (lambda: SAY.reward(A, 1), {"reward": 1.0}),
    (lambda: SAY.thumbs_up(A), {"value": True}),
    (lambda: SAY.thumbs_down(A), {"value": False}),
    (lambda: SAY.thumb(A, True), {"value": True}),
    (lambda: SAY.label(A, "rude", metric="tone"), {"value": "rude", "metric": "tone"}),
    (lambda: SAY.comment(A, "late"), {"comment": "late"}),
    (lambda: SAY.edit(A, "Monday."), {"demonstration": "Monday."}),
    (lambda: SAY.edit(A, {"content": "Monday."}), {"demonstration": {"content": "Monday."}}),
    (lambda: SAY.prefer(A, B), {"preferred_over": B}),
    (lambda: SAY.prefer(A, B, choice=0), {"preferred_over": B, "msg_ids": [f"{A}:0"]}),
    (lambda: SAY.retract(A, metric="tone"), {"retract": True, "metric": "tone"}),
    (lambda: SAY.reward(A, 1, source="ann"), {"source": "ann"}),
    (lambda: SAY.reward(A, 1, key="k"), {"idempotency_key": "k"}),
    (lambda: SAY.reward(A, 1, time=5), {"time": 5.0}),
    (lambda: SAY.reward(A, 1, time=datetime.fromtimestamp(5, UTC)), {"time": 5.0}),
    (lambda: SAY.reward(A, 1, task_id="t", run_id=1), {"msg_ids": [A], "task_id": "t", "run_id": "1"}),
]


@pytest.mark.parametrize(("say", "entry"), SAID)
def test_a_verb_is_an_entry_that_the_service_understands(say: Callable[[], list[Entry]], entry: dict[str, Any]) -> None:
    [said] = say()
    assert said | entry == said
    assert {"msg_ids", "source", "time", "idempotency_key"} <= said.keys()
    assert len(parse_entries({"feedback": [said]}, None)) == 1


def test_a_run_is_said_something_of_as_a_whole() -> None:
    [said] = SAY.reward(WholeRun("t", 3), 0.5)
    assert (said["task_id"], said["run_id"], said["reward"]) == ("t", "3", 0.5)
    assert "msg_ids" not in said


def test_each_call_has_a_key_and_its_time() -> None:
    [first], [second] = SAY.reward(A, 1), SAY.reward(A, 1)
    assert first["idempotency_key"] != second["idempotency_key"]
    assert 0 <= second["time"] - first["time"] < 60


def test_a_score_is_said_with_its_components() -> None:
    score = Composite({"right": lambda reply: 1.0, "quiet": lambda reply: None}, weights={"right": 2.0, "quiet": 1.0})
    said = SAY.reward(A, score(Reply(text="x")))
    assert [(each["metric"], each["value"]) for each in said] == [("reward", 2.0), ("right", 1.0)]


ODD: list[Callable[[], object]] = [
    lambda: SAY.reward(A, float("nan")),
    lambda: SAY.reward(A, float("inf")),
    lambda: SAY.reward(A, 1e7),
    lambda: SAY.reward(A, True),
    lambda: SAY.reward(A, "1"),  # type: ignore[arg-type]
    lambda: SAY.reward(A, None),  # type: ignore[arg-type]
    lambda: SAY.thumb(A, 1),  # type: ignore[arg-type]
    lambda: SAY.label(A, ""),
    lambda: SAY.label(A, "x" * 257),
    lambda: SAY.label(A, "\0"),
    lambda: SAY.comment(A, ""),
    lambda: SAY.comment(A, "\ud800"),
    lambda: SAY.comment(A, "x" * (5 << 20)),
    lambda: SAY.edit(A, ""),
    lambda: SAY.edit(A, {"content": object()}),
    lambda: SAY.prefer(A, A),
    lambda: SAY.prefer([A, B], B),
    lambda: SAY.prefer(WholeRun("t", 0), B),
    lambda: SAY.reward(A, 1, metric="x" * 257),
    lambda: SAY.reward(A, 1, source=""),
    lambda: SAY.reward(A, 1, key="x" * 257),
]


@pytest.mark.parametrize("say", ODD)
def test_what_the_service_would_refuse_is_refused_at_once(say: Callable[[], object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        say()


def test_a_number_of_another_library_is_a_number() -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    [said] = SAY.reward(A, Scalar())  # type: ignore[arg-type]
    assert said["reward"] == 0.5
