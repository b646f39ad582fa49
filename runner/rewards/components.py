"""Provides reward components, each a function of a reply, and weighted rewards of them."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuneloop.runner.rewards.composite import Component, Composite
from tuneloop.runner.rewards.reply import Reply, ToolCall, tool_names

_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")


def exact_match(*, ignore_case: bool = True) -> Component:
    """1 if the text equals `expected`, apart from surrounding white space."""

    def component(reply: Reply) -> float:
        given, right = reply.text.strip(), str(_expected_value(reply, "exact_match")).strip()
        return float(given.casefold() == right.casefold() if ignore_case else given == right)

    return component


def contains(*words: str, ignore_case: bool = True) -> Component:
    """The share of the words in the text; without words, whether it contains `expected`."""

    def component(reply: Reply) -> float:
        wanted = words or (str(_expected_value(reply, "contains")),)
        text = reply.text.casefold() if ignore_case else reply.text
        return sum((each.casefold() if ignore_case else each) in text for each in wanted) / len(wanted)

    return component


def matches(pattern: str) -> Component:
    """1 if the regular expression matches in the text; `.` excludes newlines."""
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda reply: float(compiled.search(reply.text) is not None)


def numeric(*, tolerance: float = 1e-6) -> Component:
    """1 if the last number in the text is `expected`, within `tolerance` (relative, absolute below 1)."""

    def component(reply: Reply) -> float:
        right = float(str(_expected_value(reply, "numeric")).replace(",", ""))
        given = numbers_in(reply.text)
        return float(bool(given) and abs(given[-1] - right) <= tolerance * max(1.0, abs(right)))

    return component


def numbers_in(text: str) -> list[float]:
    """The finite numbers in a text, in order.

    >>> numbers_in("x = 5 or -3, so 1,234.5 and 2e3 but not v2")
    [5.0, -3.0, 1234.5, 2000.0]
    """
    found = [float(each.replace(",", "").replace("\u2212", "-")) for each in _NUMBER.findall(text)]
    return [each for each in found if math.isfinite(each)]


def json_format() -> Component:
    def component(reply: Reply) -> float:
        try:
            json.loads(reply.text)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0

    return component


def tool_name(*expected: str) -> Component:
    """The share of expected tools called in order; `expected` defaults to the reply's `expected_calls`."""

    def component(reply: Reply) -> float:
        wanted = expected or tuple(each.name for each in _expected_calls(reply, "tool_name"))
        called = iter([each.name for each in reply.tool_calls])
        return sum(name in called for name in wanted) / len(wanted)

    return component


def tool_arguments() -> Component:
    """The share of expected arguments equal as JSON, in the next call of that name; an unexpected one counts as wrong.

    >>> said = ToolCall("search", {"q": "invoice", "limit": 5})
    >>> right = ToolCall("search", {"q": "invoice", "limit": 10})
    >>> tool_arguments()(Reply(text="", tool_calls=(said,), expected_calls=(right,)))
    0.5
    """

    def component(reply: Reply) -> float:
        left = list(reply.tool_calls)
        shares = []
        for wanted in _expected_calls(reply, "tool_arguments"):
            call = next((each for each in left if each.name == wanted.name), None)
            if call is not None:
                left.remove(call)
            given, right = None if call is None else call.arguments, wanted.arguments or {}
            if given is None:
                shares.append(0.0)
                continue
            names = given.keys() | right.keys()
            equal = sum(name in given and name in right and same_json(given[name], right[name]) for name in names)
            shares.append(equal / len(names) if names else 1.0)
        return sum(shares) / len(shares)

    return component


def tool_success() -> Component:
    """The share of successful tool results; None without tool calls."""

    def component(reply: Reply) -> float | None:
        if not reply.results:
            return 0.0 if reply.tool_calls else None
        return sum(each.succeeded for each in reply.results) / len(reply.results)

    return component


def invalid_tools(*offered: str | Mapping[str, Any]) -> Component:
    """The number of calls to tools that were not offered, or without a JSON object. Use a negative weight."""

    names = tool_names(offered)

    def component(reply: Reply) -> float:
        known = names or reply.tools
        return float(sum(each.arguments is None or bool(known and each.name not in known) for each in reply.tool_calls))

    return component


def steps(*, free: int = 0) -> Component:
    """The number of assistant turns beyond `free`. Use a negative weight."""
    return lambda reply: float(max(0, reply.turns - free))


def efficiency() -> Component:
    """1 / (1 + number of tool calls)."""
    return lambda reply: 1 / (1 + len(reply.tool_calls))


def length(*, most: int) -> Component:
    """The excess over `most` characters as a share of `most`, at most 1. Use a negative weight."""
    if most < 1:
        raise ValueError("most must be at least 1")
    return lambda reply: min(1.0, max(0, len(reply.text) - most) / most)


def fact(name: str) -> Component:
    """The reply's fact of this name, or None."""

    def component(reply: Reply) -> float | None:
        value = reply.facts.get(name)
        return None if value is None else float(value)

    return component


def math_reward(*, answer_format: str = r"(?i)\banswer\b\s*[:=]", free_steps: int = 0) -> Composite:
    """For numeric answers: correctness 3, each turn beyond `free_steps` -0.1, the format 0.5."""
    components = {"correctness": numeric(), "steps_penalty": steps(free=free_steps)}
    weights = {"correctness": 3.0, "steps_penalty": -0.1, "format_bonus": 0.5}
    return Composite(components | {"format_bonus": matches(answer_format)}, weights=weights)


def tool_reward(*offered: str | Mapping[str, Any]) -> Composite:
    """For tool use: right tools 1, right arguments 0.5, success 1, each invalid call -2."""
    components = {"correct_tool": tool_name(), "correct_args": tool_arguments(), "tool_success": tool_success()}
    weights = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}
    return Composite(components | {"invalid_tool": invalid_tools(*offered)}, weights=weights)


def game_reward() -> Composite:
    """For team games, by facts: win 10, survival 5, a successful blame 2, exposure -5."""
    weights = {"team_win": 10.0, "individual_survive": 5.0, "successfully_blame": 2.0, "exposed_penalty": -5.0}
    return Composite({name: fact(name) for name in weights}, weights=weights)


def task_reward(accuracy: Component | None = None) -> Composite:
    """For tasks: the fact `completion` 2, few tool calls 1, `accuracy` 1.5 (default `contains()`)."""
    components = {"completion": fact("completion"), "efficiency": efficiency(), "accuracy": accuracy or contains()}
    return Composite(components, weights={"completion": 2.0, "efficiency": 1.0, "accuracy": 1.5})


def same_json(a: object, b: object) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_json, a, b))
    return a == b


def _expected_value(reply: Reply, who: str) -> object:
    if reply.expected is None:
        raise ValueError(f"{who}: the reply has no expected answer")
    return reply.expected


def _expected_calls(reply: Reply, who: str) -> Sequence[ToolCall]:
    if not reply.expected_calls:
        raise ValueError(f"{who}: the reply has no expected calls")
    return reply.expected_calls


_ANSWER = re.compile(r"(?:\banswer\b(?:\s+is\b)?|答案)\s*[:=：]?\s*(?P<answer>[^\n]+)", re.IGNORECASE)  # noqa: RUF001
_FORMAT = r"(?i)(?:\banswer\b|答案)\s*[:=：]"  # noqa: RUF001

#: Count errors, so a positive weight would reward them.
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
    """A reward of named components with weights; `components` adds or replaces components.

    Raises ValueError for an unknown name, a penalty with a positive weight, and as Composite does.

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
    """1 if the answer is `expected`: a number, the text after "answer:", or the whole reply."""
    expected = str(reply.expected).strip().replace(",", "")
    if reply.expected is not None and re.fullmatch(r"[-+]?\d+(?:\.\d+)?", expected):
        return numeric()(reply)
    found = [each["answer"].strip().rstrip(".") for each in _ANSWER.finditer(reply.text)]
    answer = found[-1] if found else reply.text
    return exact_match()(Reply(text=answer, expected=reply.expected))
