"""A shop's assistant has three tools and must call the right one for the right order.

The reward of a reply is a sum: 1.0 for the right tool, 0.5 for the right argument, 1.0 if the tool then succeeds; a
reply that calls an unknown tool costs 2.0.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from examples.tasks.dialogue import Call, Dialogue, Reply, Tool, Verdict, call_of

CORRECT_TOOL, CORRECT_ARGS, TOOL_SUCCESS, INVALID_TOOL = 1.0, 0.5, 1.0, -2.0

_SAID = {
    "track": ("where is {}?", "has {} left?"),
    "cancel": ("stop {} now", "no more {}"),
    "refund": ("money for {}", "pay back {}"),
}
_SLIPS, _INVENTED = 0.56, 0.1


class Wish(NamedTuple):
    """A customer's text, and the right call."""

    text: str
    tool: str
    order: int


class Shop:
    """The tools track, cancel and refund, each of which takes the number of an order, 0 to 9."""

    name = "tools"
    tools: Sequence[Tool] = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"order": {"type": "integer"}},
                    "required": ["order"],
                },
            },
        }
        for name in _SAID
    )
    max_tokens = 48
    reward_range = (INVALID_TOOL, CORRECT_TOOL + CORRECT_ARGS + TOOL_SUCCESS)

    def questions(self) -> Sequence[Wish]:
        """Two phrases for each tool, ten orders."""
        return [Wish(said.format(n), tool, n) for tool, phrases in _SAID.items() for said in phrases for n in range(10)]

    def dialogue(self, question: Wish) -> Dialogue:
        """Ask, and judge the call."""
        reply = yield [{"role": "user", "content": question.text}]
        reward = judge(question, reply.calls)
        return Verdict(reward, reward == self.reward_range[1])

    def replies(self, question: Wish, slip: random.Random | None) -> Iterator[Reply]:
        """The right call; slips change the tool, the order or both, and sometimes the tool is invented."""
        tool, order = question.tool, question.order
        if slip and slip.random() < _SLIPS:
            tool = "help" if slip.random() < _INVENTED else slip.choice(tuple(_SAID))
        if slip and slip.random() < _SLIPS:
            order = slip.randrange(10)
        yield call_of(tool, order=order)


def judge(asked: Wish, calls: Sequence[Call]) -> float:
    """The reward of a reply with `calls`: only the first counts, and more than one is invalid."""
    if len(calls) != 1 or calls[0].name not in _SAID:
        return INVALID_TOOL
    right_tool, right_args = calls[0].name == asked.tool, calls[0].parsed_arguments() == {"order": asked.order}
    served = right_tool and right_args
    return CORRECT_TOOL * right_tool + CORRECT_ARGS * right_args + TOOL_SUCCESS * served
