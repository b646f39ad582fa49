"""Word problems of two or more operations, made here in the format of GSM8K, and the calculator that works one out.

Each operation of a problem uses the previous result. An agent makes one
call of the calculator for each, then answers. GSM8K's answers end in `#### 12`; so do these.
"""

import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from examples.tasks.dialogue import Dialogue, Message, Reply, Tool, Verdict, call_of
from tuneloop.runner import Reply as Judged
from tuneloop.runner.rewards.components import math_reward

PROMPT = "Solve the problem. Calculate step by step, then say the answer."
#: Calls of the model in one run; a run without an answer gets 0.
MOST_CALLS = 10
CALCULATE: Tool = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate one operation.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "two whole numbers and + - or *"}},
            "required": ["expression"],
        },
    },
}
REWARD = math_reward()

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"\s*(-?[0-9]{1,6})\s*([-+*])\s*(-?[0-9]{1,6})\s*")
_NAMES = ("Ana", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo")
_THINGS = ("pens", "books", "apples", "coins", "cards", "shells")
_STARTS = ("{name} has {n} boxes of {k} {things}.", "{name} fills {n} bags with {k} {things} each.")
_MORE = {
    "+": ("{name} buys {k} more.", "{other} brings {k}.", "{name} finds {k}."),
    "-": ("{name} loses {k}.", "{other} takes {k}.", "{name} gives away {k}."),
    "*": ("Then there are {k} times as many.", "It all becomes {k} times as much."),
}
_ENDS = ("How many {things} does {name} have?", "How many {things} are there now?")
#: Shares of the slips of the start model's teacher: a wrong operation, a calculation made again, a bare answer.
_WRONG, _AGAIN, _BARE = 0.22, 0.42, 0.4


def calculate(expression: object) -> str:
    """The tool's result: one operation on two whole numbers, or an error."""
    found = _EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
    if found is None:
        return "error: one operation on two whole numbers"
    left, sign, right = found.groups()
    return str(_OPERATIONS[sign](int(left), int(right)))


def problems(seed: int, number: int, *, most: int = 3) -> list[dict[str, Any]]:
    """So many problems of two to `most` operations: `question`, `answer`, and the `expressions` that lead to it."""
    chance = random.Random(f"problems {seed}")
    return [problem(chance, chance.randint(2, most)) for _ in range(number)]


def problem(chance: random.Random, operations: int) -> dict[str, Any]:
    name, other = chance.sample(_NAMES, 2)
    things, (n, k) = chance.choice(_THINGS), chance.sample(range(2, 10), 2)
    words = {"name": name, "other": other, "things": things}
    text = [chance.choice(_STARTS).format(**words, n=n, k=k)]
    expressions, total, left = [f"{n}*{k}"], n * k, [each for each in range(2, 10) if each not in (n, k)]
    for _ in range(operations - 1):
        # Each number once, so that a problem has one order only.
        k = left.pop(chance.randrange(len(left)))
        sign = chance.choice(
            [each for each in "+-*" if not (each == "-" and k >= total) and not (each == "*" and total > 99)]
        )
        text.append(chance.choice(_MORE[sign]).format(**words, k=k))
        expressions.append(f"{total}{sign}{k}")
        total = _OPERATIONS[sign](total, k)
    text.append(chance.choice(_ENDS).format(**words))
    steps = "\n".join(f"{each} = {calculate(each)}" for each in expressions)
    return {"question": " ".join(text), "answer": f"{steps}\n#### {total}", "expressions": expressions}


def number_of(answer: str) -> int:
    """The number that an answer of GSM8K ends in."""
    return int(answer.rpartition("####")[2].replace(",", ""))


def judge(task: Mapping[str, Any], text: str, turns: int) -> Verdict:
    """Whether the answer is right, and the run's reward; `turns` counts the calls of the model."""
    score = REWARD(Judged(text=text, expected=number_of(task["answer"]), turns=turns))
    right = score.values["correctness"]
    metrics = {"accuracy": right, "steps": float(turns), "format": score.values["format_bonus"]}
    return Verdict(score.total, right == 1.0, metrics)


class Problems:
    """The problems as a task for a model in this process."""

    name = "math_agent"
    tools: Sequence[Tool] = (CALCULATE,)
    max_tokens = 48
    reward_range = (-1.0, 3.4)

    def __init__(self, *, most: int = 3, number: int = 4096) -> None:
        self._problems = problems(0, number, most=most)

    def questions(self) -> Sequence[dict[str, Any]]:
        """The questions for training."""
        return self._problems

    def dialogue(self, question: Mapping[str, Any]) -> Dialogue:
        """The agent of the examples."""
        messages: list[Message] = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": question["question"]},
        ]
        for turn in range(1, MOST_CALLS + 1):
            reply = yield list(messages)
            if not reply.calls:
                return judge(question, reply.text, turn)
            results = [call.with_result(calculate(call.parsed_arguments().get("expression"))) for call in reply.calls]
            messages += [reply.message, *results]
        return judge(question, "", MOST_CALLS)

    def replies(self, question: Mapping[str, Any], slip: random.Random | None) -> Iterator[Reply]:
        """Each operation, then the answer; with slips some operations are wrong, and some are made again."""
        total, expressions = "", question["expressions"]
        for calls, right in enumerate(expressions):
            expression = right if not calls else total + re.sub(r"^[0-9]+", "", right)
            if slip and slip.random() < _WRONG:
                expression = _with_slip(expression, slip)
            yield call_of("calculate", expression=expression)
            while slip and slip.random() < _AGAIN:
                yield call_of("calculate", expression=expression)
            total = calculate(expression)
        bare = slip is not None and slip.random() < _BARE
        yield Reply(f"It is {total}." if bare else f"Answer: {total}")


def _with_slip(expression: str, slip: random.Random) -> str:
    """Another operation, or another second number."""
    left, sign, right = _EXPRESSION.fullmatch(expression).groups()  # type: ignore[union-attr]
    if slip.random() < 0.5:
        return f"{left}{slip.choice([each for each in '+*' if each != sign])}{right}"
    return f"{left}{sign}{slip.randint(1, 9)}"
