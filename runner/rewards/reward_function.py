"""A reward named by weights alone, such as {"correctness": 3.0, "steps_penalty": -0.1}. Pure."""

import re
from collections.abc import Callable, Mapping

from tuneloop.runner.rewards.components import (
    efficiency,
    exact_match,
    fact,
    invalid_tools,
    matches,
    numeric,
    steps,
    tool_arguments,
    tool_name,
    tool_success,
)
from tuneloop.runner.rewards.composite import Component, Composite
from tuneloop.runner.rewards.reply import Reply

_ANSWER = re.compile(r"(?:\banswer\b(?:\s+is\b)?|答案)\s*[:=：]?\s*(?P<answer>[^\n]+)", re.IGNORECASE)  # noqa: RUF001
_FORMAT = r"(?i)(?:\banswer\b|答案)\s*[:=：]"  # noqa: RUF001

#: They count what is wrong, so a weight above 0 would reward it.
_PENALTIES = frozenset({"steps_penalty", "invalid_tool", "exposed_penalty"})

_NAMED: Mapping[str, Callable[[], Component]] = {
    "correctness": lambda: _correct,
    "steps_penalty": steps,
    "format_bonus": lambda: matches(_FORMAT),
    "correct_tool": tool_name,
    "correct_args": tool_arguments,
    "tool_success": tool_success,
    "invalid_tool": invalid_tools,
    "efficiency": efficiency,
    "completion": lambda: fact("completion"),
    "team_win": lambda: fact("team_win"),
    "individual_survive": lambda: fact("individual_survive"),
    "successfully_blame": lambda: fact("successfully_blame"),
    "exposed_penalty": lambda: fact("exposed_penalty"),
}


def reward_function(
    weights: Mapping[str, float],
    *,
    components: Mapping[str, Component] | None = None,
    clip: tuple[float, float] | None = None,
) -> Composite:
    """The reward with these components, each known by its name, times these weights.

    `components` are yours; one of the name of ours takes its place. Raises ValueError for a name that nobody knows,
    a penalty with a weight above 0, and what a Composite refuses.

    >>> reward = reward_function({"correctness": 3.0, "steps_penalty": -0.1, "format_bonus": 0.5})
    >>> reward(Reply(text="Answer: 12", expected=12, turns=5)).total
    3.0
    """
    own = dict(components or {})
    if unknown := sorted(weights.keys() - own.keys() - _NAMED.keys()):
        raise ValueError(f"no component is called {unknown[0]}: these are known: {', '.join(_NAMED)}; give your own")
    if unused := sorted(own.keys() - weights.keys()):
        raise ValueError(f"component {unused[0]} has no weight")
    if wrong := sorted(name for name in _PENALTIES & (weights.keys() - own.keys()) if weights[name] > 0):
        raise ValueError(f"{wrong[0]} counts what is wrong: its weight must not be above 0")
    return Composite({name: own.get(name) or _NAMED[name]() for name in weights}, weights=weights, clip=clip)


def _correct(reply: Reply) -> float | None:
    """1 if the reply's answer is `expected`: its last number, or else what follows "answer:", or else all of it."""
    expected = str(reply.expected).strip().replace(",", "")
    if reply.expected is not None and re.fullmatch(r"[-+]?\d+(?:\.\d+)?", expected):
        return numeric()(reply)
    found = [each["answer"].strip().rstrip(".") for each in _ANSWER.finditer(reply.text)]
    answer = found[-1] if found else reply.text
    return exact_match()(Reply(text=answer, expected=reply.expected))
