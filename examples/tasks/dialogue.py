"""An agent without the network: it yields the next request, gets the reply, and judges at the end.

A dialogue is a generator, so that the same agent plays against an OpenAI endpoint and against a model in this process:

    asked = next(dialogue)                   the first messages
    asked = dialogue.send(reply)             the next ones, with what the tool said
    StopIteration.value                      the verdict on the whole run
"""

import json
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
Tool = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


class Call(NamedTuple):
    """A tool call by the model; `arguments` is its JSON text."""

    id: str
    name: str
    arguments: str

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments, {} without a JSON object."""
        try:
            given = json.loads(self.arguments)
        except ValueError:
            return {}
        return given if isinstance(given, dict) else {}

    def with_result(self, result: str) -> Message:
        """The tool's message."""
        return {"role": "tool", "tool_call_id": self.id, "content": result}


class Reply(NamedTuple):
    """The model's reply."""

    text: str
    calls: tuple[Call, ...] = ()

    @property
    def message(self) -> Message:
        """The reply as a message of the conversation."""
        said: Message = {"role": "assistant", "content": self.text or None}
        if self.calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return said


class Verdict(NamedTuple):
    """`reward` is the run's feedback, `right` whether the run succeeded, `metrics` are further figures."""

    reward: float
    right: bool
    metrics: Mapping[str, float] = MappingProxyType({})


Dialogue = Generator[list[Message], Reply, Verdict]


class Task(Protocol):
    """A kind of question, and the agent that asks it. `reward_range` bounds the rewards."""

    name: str
    tools: Sequence[Tool]
    max_tokens: int
    reward_range: tuple[float, float]

    def questions(self) -> Sequence[Any]: ...

    def dialogue(self, question: Any) -> Dialogue:
        """One run of the agent."""
        ...

    def replies(self, question: Any, slip: random.Random | None) -> Iterator[Reply]:
        """A teacher's replies turn by turn; with `slip` often wrong ones."""
        ...


def forever(task: Task, seed: int) -> Iterator[Any]:
    """Endless questions, each once per round."""
    order, every = random.Random(seed), task.questions()
    while True:
        yield from order.sample(every, len(every))


def call_of(name: str, **arguments: object) -> Reply:
    """A reply that calls one tool."""
    return Reply("", (Call("call_0", name, json.dumps(arguments)),))


def text_of(reply: Reply) -> str:
    """The reply as the model writes it (the Hermes format), as the chat template shows it later."""
    calls = [f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>' for c in reply.calls]
    return "\n".join([*([reply.text] if reply.text else []), *calls])


def read(text: str) -> Reply:
    """Parse the model's text like vLLM's parser `hermes`: with one invalid call, all of it is text."""
    if "<tool_call>" not in text:
        return Reply(text)
    try:
        found = [json.loads(whole or rest) for whole, rest in _CALL.findall(text)]
        calls = tuple(
            Call(f"call_{i}", str(each["name"]), json.dumps(each["arguments"], ensure_ascii=False))
            for i, each in enumerate(found)
        )
    except (ValueError, KeyError, TypeError):
        return Reply(text)
    return Reply(text[: text.find("<tool_call>")], calls)
