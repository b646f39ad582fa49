"""Arithmetic in two steps with a calculator that does one at a time: two calls, then the answer, in one run.

The agent plays the tool's part. The run is worth 1 if the last reply is the right number, else 0; every call of the run
gets that reward, so the trainer must find out which of them earned it.
"""

import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from examples.tasks.dialogue import Dialogue, Message, Reply, Tool, Verdict, call_of

_OPERATIONS = {"+": operator.add, "*": operator.mul}
_STEP = re.compile(r"([0-9]{1,3})([+*])([0-9]{1,3})")
_ERROR = "error"
_DIGITS = range(1, 6)
_SLIPS = 0.42
#: A run with more calls is ended.
MOST_CALLS = 3


class Sequel(NamedTuple):
    """(left first middle) second right."""

    left: int
    first: str
    middle: int
    second: str
    right: int

    @property
    def text(self) -> str:
        """What the user asks."""
        return f"({self.left}{self.first}{self.middle}){self.second}{self.right}="

    @property
    def steps(self) -> tuple[str, str]:
        """The two expressions to be calculated."""
        one = f"{self.left}{self.first}{self.middle}"
        return one, f"{calculate(one)}{self.second}{self.right}"


def calculate(expression: object) -> str:
    """The tool's result: one operation on two numbers, or `error`."""
    step = _STEP.fullmatch(expression) if isinstance(expression, str) else None
    if step is None:
        return _ERROR
    left, sign, right = step.groups()
    return str(_OPERATIONS[sign](int(left), int(right)))


class Calculator:
    """The tool `calc`, for an expression of two numbers."""

    name = "calculator"
    tools: Sequence[Tool] = (
        {
            "type": "function",
            "function": {
                "name": "calc",
                "parameters": {
                    "type": "object",
                    "properties": {"expr": {"type": "string"}},
                    "required": ["expr"],
                },
            },
        },
    )
    max_tokens = 64
    reward_range = (0.0, 1.0)

    def questions(self) -> Sequence[Sequel]:
        """Three digits and two signs."""
        signs = tuple(_OPERATIONS)
        return [
            Sequel(left, first, middle, second, right)
            for first in signs
            for second in signs
            for left in _DIGITS
            for middle in _DIGITS
            for right in _DIGITS
        ]

    def dialogue(self, question: Sequel) -> Dialogue:
        """Ask, run the requested calculations, and judge the first reply without a call."""
        wanted = calculate(question.steps[1])
        messages: list[Message] = [{"role": "user", "content": question.text}]
        for _ in range(MOST_CALLS):
            reply = yield list(messages)
            if not reply.calls:
                right = reply.text.strip() == wanted
                return Verdict(float(right), right)
            results = [call.with_result(calculate(call.parsed_arguments().get("expr"))) for call in reply.calls]
            messages += [reply.message, *results]
        return Verdict(0.0, False)

    def replies(self, question: Sequel, slip: random.Random | None) -> Iterator[Reply]:
        """Both steps and the answer; a slip calculates or answers something else, and continues from there."""
        one = _with_slip(question.steps[0], slip)
        yield call_of("calc", expr=one)
        two = _with_slip(f"{calculate(one)}{question.second}{question.right}", slip)
        yield call_of("calc", expr=two)
        answer = calculate(two)
        yield Reply(str(slip.randrange(1, 51)) if slip and slip.random() < _SLIPS else answer)


def _with_slip(step: str, slip: random.Random | None) -> str:
    """The step with another second number or another sign."""
    if slip is None or slip.random() > _SLIPS:
        return step
    left, _, right = _STEP.fullmatch(step).groups()  # type: ignore[union-attr]
    return f"{left}{slip.choice(tuple(_OPERATIONS))}{slip.choice((right, str(slip.choice(_DIGITS))))}"
