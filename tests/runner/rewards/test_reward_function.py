"""Rewards that are named by their weights."""

from typing import Any

import pytest

from tuneloop.runner import Reply, ToolCall, reward_function
from tuneloop.runner.rewards.components import invalid_tools, tool_reward
from tuneloop.runner.rewards.reply import ToolResult

TOOLS = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Paris", 1.0),
        ("Let me think.\nAnswer: Paris.", 1.0),
        ("Answer: Rome\nNo. The answer is Paris", 1.0),
        ("答案:Paris", 1.0),
        ("Paris, Rome, London or Berlin", 0.0),
        ("Answer: Paris or Rome", 0.0),
    ],
)
def test_an_answer_in_words_is_compared_as_a_whole(text: str, right: float) -> None:
    assert reward_function({"correctness": 1.0})(Reply(text=text, expected="Paris")).total == right


@pytest.mark.parametrize(
    "told",
    [(), ("search",), [{"type": "function", "function": {"name": "search"}}], [{"type": "function", "name": "search"}]],
)
def test_a_right_call_is_valid_however_the_tools_are_told(told: Any) -> None:
    wanted = (ToolCall("search", {"q": "invoice"}),)
    said: dict[str, Any] = {"text": "", "tool_calls": wanted, "expected_calls": wanted}
    reply = Reply(**said, tools=told, results=(ToolResult("1 mail", True),))
    assert reward_function(TOOLS)(reply).total == 2.5
    assert tool_reward(*told)(Reply(**said, results=(ToolResult("1 mail", True),))).total == 2.5
    broken = Reply(text="", tools=told, tool_calls=(ToolCall("search", None),))
    assert invalid_tools(*told)(broken) == 1.0
    other = Reply(text="", tools=told, tool_calls=(ToolCall("delete", {}),))
    assert invalid_tools()(other) == float(bool(told))
    with pytest.raises(ValueError, match="a tool has no name"):
        Reply(text="", tools=({"type": "function"},))  # type: ignore[arg-type]


def test_own_components_go_beside_ours_or_in_their_place() -> None:
    weights = {"correctness": 1.0, "brevity": 0.5}
    reward = reward_function(weights, components={"brevity": lambda reply: 1.0, "correctness": lambda reply: 0.5})
    assert reward(Reply(text="")).total == 1.0


@pytest.mark.parametrize(
    ("weights", "components", "words"),
    [
        ({"corectness": 1.0}, {}, "no component is called corectness"),
        ({"correctness": 1.0}, {"brevity": lambda reply: 1.0}, "brevity has no weight"),
        ({"steps_penalty": 0.1}, {}, "steps_penalty counts what is wrong"),
        ({"correctness": float("nan")}, {}, "weights must be finite"),
    ],
)
def test_what_makes_no_sense_is_refused(weights: dict, components: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        reward_function(weights, components=components)
