"""Rewards made of components: the sums that the ready-made ones come to, and what they refuse."""

import doctest
import importlib
import math
import pkgutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop import runner
from tuneloop.runner import Composite, Reply, ToolCall, ToolResult
from tuneloop.runner.rewards.components import (
    contains,
    exact_match,
    game_reward,
    invalid_tools,
    length,
    matches,
    math_reward,
    numbers_in,
    numeric,
    steps,
    task_reward,
    tool_arguments,
    tool_name,
    tool_reward,
    tool_success,
)
from tuneloop.shared.experience import Kind
from tuneloop.shared.ledger.recording.reward_rule import Event, reward_of
from tuneloop.shared.settings.feedback import RewardRule

MODULES = [
    each.name
    for each in pkgutil.walk_packages(runner.__path__, "tuneloop.runner.")
    if not each.name.endswith(("__main__", ".model_selection"))  # which raises: there is nothing behind that name
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_code_are_right(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_math_is_rewarded_by_its_answer_its_steps_and_its_format() -> None:
    reward = math_reward()
    right = reward(Reply(text="Step 1 … Answer: 12", expected="12", turns=4))
    assert dict(right.values) == {"correctness": 1.0, "steps_penalty": 4.0, "format_bonus": 1.0}
    assert dict(right.parts) == {"correctness": 3.0, "steps_penalty": pytest.approx(-0.4), "format_bonus": 0.5}
    assert right.total == pytest.approx(3.1)
    assert reward(Reply(text="13", expected=12)).total == pytest.approx(-0.1)


SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}


def called(name: str, arguments: str = '{"q": "invoice"}') -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_rewarded_by_choice_arguments_success_and_nonsense() -> None:
    run = [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": None, "tool_calls": [called("search")]},
        {"role": "tool", "tool_call_id": "c", "content": '{"mails": 1}'},
        {"role": "assistant", "content": None, "tool_calls": [called("erase_all"), called("search", "{broken")]},
        {"role": "tool", "tool_call_id": "c", "content": '{"error": "no such tool"}'},
        {"role": "assistant", "content": "Here it is."},
    ]
    known: dict[str, Any] = {"expected_calls": (ToolCall("search", {"q": "invoice"}),)}
    score = tool_reward("search")(Reply.of_trajectory(run, **known))
    assert dict(score.values) == {"correct_tool": 1.0, "correct_args": 1.0, "tool_success": 0.5, "invalid_tool": 2.0}
    assert score.total == pytest.approx(1.0 + 0.5 + 0.5 - 4.0)


def test_a_game_is_rewarded_by_its_facts_and_what_is_not_known_is_left_out() -> None:
    score = game_reward()(Reply(text="", facts={"team_win": True, "exposed_penalty": 1.0}))
    assert score.total == 5.0
    assert score.values["individual_survive"] is None
    assert score.parts.keys() == {"team_win", "exposed_penalty"}


def test_a_task_is_rewarded_by_its_completion_its_tool_calls_and_its_accuracy() -> None:
    run = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [called("search"), called("read"), called("read")]},
        {"role": "assistant", "content": "It is in Paris."},
    ]
    score = task_reward()(Reply.of_trajectory(run, expected="paris", facts={"completion": 0.8}))
    assert dict(score.values) == {"completion": 0.8, "efficiency": 0.25, "accuracy": 1.0}
    assert dict(score.parts) == {"completion": 1.6, "efficiency": 0.25, "accuracy": 1.5}
    assert score.total == pytest.approx(0.8 * 2.0 + 1 / (3 + 1) * 1.0 + 1.0 * 1.5)
    assert task_reward()(Reply(text="Rome", expected="Paris", facts={"completion": 1.0})).total == 3.0


def test_the_total_is_clipped_and_what_it_was_made_of_is_kept() -> None:
    reward = Composite({"x": lambda _: 10.0}, weights={"x": 2.0}, clip=(-1.0, 1.0))
    score = reward(Reply(text=""))
    assert (score.total, score.parts["x"]) == (1.0, 20.0)


def test_a_score_becomes_feedback_with_each_value_beside_the_total() -> None:
    score = math_reward()(Reply(text="Answer: 12", expected=12))
    said = score.as_feedback("chatcmpl-1", source="math")["feedback"]
    assert {each["metric"]: each["value"] for each in said} == {"reward": score.total, **score.values}
    assert all((each["msg_ids"], each["source"]) == (["chatcmpl-1"], "math") for each in said)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_component_that_is_not_finite_is_an_error_that_names_it(value: float) -> None:
    with pytest.raises(ValueError, match="component odd"):
        Composite({"odd": lambda _: value}, weights={"odd": 1.0})(Reply(text=""))


@pytest.mark.parametrize(
    ("weights", "clip"), [({}, None), ({"x": 1.0, "y": 1.0}, None), ({"x": math.nan}, None), ({"x": 1.0}, (1.0, 1.0))]
)
def test_weights_and_clips_that_make_no_sense_are_refused(weights: dict[str, float], clip: Any) -> None:
    with pytest.raises(ValueError, match=r"weight|clip"):
        Composite({"x": lambda _: 1.0}, weights=weights, clip=clip)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("-3.5e2 and +7", [-350.0, 7.0]),
        ("10-3", [10.0, 3.0]),
        ("v2 x2y 3abc", []),
        ("1,234,567.5, then 12,34", [1234567.5, 12.0, 34.0]),
        ("\u22125", [-5.0]),
        ("9" * 400, []),
        ("$4.50.", [4.5]),
        ("", []),
    ],
)
def test_numbers_in_texts(text: str, numbers: list[float]) -> None:
    assert numbers_in(text) == numbers


def test_texts() -> None:
    paris = Reply(text="Paris", expected="paris")
    assert (exact_match()(paris), exact_match(ignore_case=False)(paris)) == (1.0, 0.0)
    assert contains()(Reply(text="It is PARIS.", expected="paris")) == 1.0
    assert matches("^b$")(Reply(text="a\nb\nc")) == 1.0
    assert numeric(tolerance=0.01)(Reply(text="101", expected=100.5)) == 1.0
    assert numeric()(Reply(text="nothing", expected=1)) == 0.0
    assert [length(most=10)(Reply(text="x" * size)) for size in (10, 12, 99)] == [0.0, 0.2, 1.0]
    assert steps()(Reply(text="", turns=2)) == 2.0


def test_tools() -> None:
    calls = (ToolCall("a", {"x": 1, "y": [True]}), ToolCall("b", None))
    reply = Reply(text="", tool_calls=calls, tools=("a",), expected_calls=(ToolCall("a", {"x": 1.0, "y": [1]}),))
    assert tool_name("a", "b")(reply) == 1.0
    assert tool_name("b", "a")(reply) == 0.5, "their order counts"
    assert tool_arguments()(reply) == 0.5, "1 is 1.0 and not true"
    assert invalid_tools()(reply) == 1.0
    assert invalid_tools("b")(reply) == 2.0
    assert tool_success()(reply) == 0.0, "called, and nothing came of it"
    assert tool_success()(Reply(text="", results=(ToolResult("", True), ToolResult("", False)))) == 0.5
    unexpected = Reply(
        text="", tool_calls=(ToolCall("a", {"x": 1, "y": 2}),), expected_calls=(ToolCall("a", {"x": 1}),)
    )
    assert tool_arguments()(unexpected) == 0.5


def test_a_reply_is_read_from_a_completion() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [called("search"), called("x", "[]")]}
    reply = Reply.of({"choices": [{"message": message}]}, {"messages": [], "tools": [SEARCH]})
    assert reply.tool_calls == (ToolCall("search", {"q": "invoice"}), ToolCall("x", None))
    assert (reply.text, reply.tools) == ("", ("search",))


def rewarded(body: dict[str, Any], rule: RewardRule) -> float | None:
    """What a rule makes of the events that are posted."""
    said = [(each["metric"], each["value"], each["source"]) for each in body["feedback"]]
    events = [
        Event(number, Kind.NUMBER, metric, value, None, source, False, received_at=float(number))
        for number, (metric, value, source) in enumerate(said)
    ]
    reward = reward_of(rule, events, sampled_at=0.0)
    return None if reward is None else reward.value


NUMBERS = st.floats(-100, 100)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.none() | NUMBERS, NUMBERS), min_size=1),
    st.none() | st.tuples(st.floats(-9, 0), st.floats(1, 9)),
)
def test_a_rule_with_the_same_weights_and_clip_makes_the_same_of_the_components(
    parts: dict[str, tuple[float | None, float]], clip: tuple[float, float] | None
) -> None:
    """Only where no component says anything a Composite comes to 0, and the rule to nothing."""
    components = {name: (lambda _, value=value: value) for name, (value, _) in parts.items()}
    weights = {name: weight for name, (_, weight) in parts.items()}
    score = Composite(components, weights=weights, clip=clip)(Reply(text=""))
    body = score.as_feedback("chatcmpl-1", source="program")
    assert rewarded(body, RewardRule(clip=None)) == score.total
    again = rewarded(body, RewardRule(weights=weights, clip=clip, aggregate="mean"))  # which clips the sum alone
    if all(value is None for value, _ in parts.values()):
        assert (again, score.total) == (None, 0.0)
    else:
        assert again == pytest.approx(score.total, rel=1e-12, abs=1e-9)
