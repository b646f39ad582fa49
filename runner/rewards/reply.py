"""A reply as rewards and judges see it, alone or as a whole trajectory with its tool calls and their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is None if what the model wrote is no JSON object."""

    name: str
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered, and whether it succeeded."""

    content: str
    succeeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was said.

    `messages` is the conversation before the text; for a trajectory, all of it but the last text, and the first `shown`
    of the `tool_calls` stand in it. `turns` are the assistant's. `tools` are the names of the tools that were offered.
    `expected` and `expected_calls` are what would have been right, where that is known; `facts` is what the world made
    of it, such as who won the game.
    """

    text: str
    messages: tuple[Message, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    tools: tuple[str, ...] = ()
    turns: int = 1
    shown: int = 0
    expected: object = None
    expected_calls: tuple[ToolCall, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, completion: Mapping[str, Any], request: Mapping[str, Any], *, choice: int = 0, **known: Any) -> "Reply":
        """One choice of a chat completion, as JSON, to a request. `known` are further fields, such as `expected`.

        >>> answer = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
        >>> Reply.of(answer, {"messages": [{"role": "user", "content": "2+2"}]}, expected=4).text
        '4'
        """
        message = completion["choices"][choice]["message"]
        offered = tuple(each["function"]["name"] for each in request.get("tools") or ())
        turns = tuple(request.get("messages") or ())
        calls = tuple(calls_of(message))
        fields = {"messages": turns, "tool_calls": calls, "tools": offered} | known
        return cls(text=text_of(message.get("content")), **fields)

    @classmethod
    def of_trajectory(cls, messages: Sequence[Message], **known: Any) -> "Reply":
        """All that was said in a run, as chat messages: its last text, every tool call in it, and what came of them.

        >>> call = {"function": {"name": "search", "arguments": '{"q": "invoice"}'}}
        >>> run = [
        ...     {"role": "user", "content": "Find the invoice."},
        ...     {"role": "assistant", "content": None, "tool_calls": [call]},
        ...     {"role": "tool", "content": "1 mail found"},
        ...     {"role": "assistant", "content": "Here it is."},
        ... ]
        >>> reply = Reply.of_trajectory(run)
        >>> reply.text, reply.turns, reply.tool_calls[0].name, reply.results[0].succeeded
        ('Here it is.', 2, 'search', True)
        """
        spoken = [each for each in messages if each.get("role") == "assistant"]
        ends = bool(messages) and messages[-1].get("role") == "assistant"
        before = tuple(messages[:-1] if ends else messages)
        fields: dict[str, Any] = {
            "messages": before,
            "shown": sum(len(calls_of(each)) for each in before if each.get("role") == "assistant"),
            "tool_calls": tuple(call for each in spoken for call in calls_of(each)),
            "results": tuple(_result(each) for each in messages if each.get("role") == "tool"),
            "turns": len(spoken),
        }
        return cls(text=text_of(spoken[-1].get("content")) if spoken else "", **fields | known)


def text_of(content: object) -> str:
    """The text of a message's content; of parts that are no text, only their kind.

    >>> text_of([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:..."}}])
    'What is this?[image_url]'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(each) for each in content)
    return json.dumps(content, ensure_ascii=False)


def _part(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"[{part.get('type', 'part')}]" if isinstance(part, Mapping) else str(part)


def calls_of(message: Message) -> Sequence[ToolCall]:
    """The tool calls of a chat message."""
    calls = message.get("tool_calls")
    functions = [each.get("function") or {} for each in calls] if isinstance(calls, list) else []
    return [ToolCall(str(each.get("name", "")), _arguments(each.get("arguments"))) for each in functions]


def _arguments(written: object) -> Mapping[str, Any] | None:
    if isinstance(written, str):
        try:
            written = json.loads(written or "{}")
        except (ValueError, RecursionError):
            return None
    return written if isinstance(written, Mapping) else None


def _result(message: Message) -> ToolResult:
    """A tool has failed if its message says so: `is_error`, an object with `error`, or a text that begins with it."""
    content = text_of(message.get("content"))
    result = _arguments(content)
    failed = message.get("is_error") or message.get("status") == "error" or (result is not None and result.get("error"))
    return ToolResult(content, not failed and not content.lstrip().lower().startswith("error"))
