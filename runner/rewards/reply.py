"""Defines a reply for rewards and judges, and converts messages of all clients to OpenAI's form."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is None for text that is no JSON object."""

    name: str
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    content: str
    succeeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply to judge.

    `messages` precede the text; of a trajectory they are all but the last text, and contain the first `shown` of the
    `tool_calls`. `turns` counts the assistant's. `tools` names the offered tools, also given as in a request; empty if
    unknown. `expected` and `expected_calls` are the right ones, if known; `facts` are outcomes, such as who won the
    game.
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

    def __post_init__(self) -> None:
        """Raises ValueError for a tool without a name."""
        object.__setattr__(self, "tools", tool_names(self.tools))

    @classmethod
    def of(cls, completion: Mapping[str, Any], request: Mapping[str, Any], *, choice: int = 0, **known: Any) -> "Reply":
        """One choice of a chat completion (JSON) for a request; `known` are further fields, such as `expected`.

        >>> answer = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
        >>> Reply.of(answer, {"messages": [{"role": "user", "content": "2+2"}]}, expected=4).text
        '4'
        """
        message = completion["choices"][choice]["message"]
        turns = tuple(request.get("messages") or ())
        calls = tuple(calls_of(message))
        fields: dict[str, Any] = {"messages": turns, "tool_calls": calls, "tools": request.get("tools") or ()}
        return cls(text=text_of(message.get("content")), **fields | known)

    @classmethod
    def of_trajectory(cls, messages: Sequence[Message], **known: Any) -> "Reply":
        """The chat messages of a run: the last text, all tool calls, and their results.

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


def tool_names(tools: Iterable[str | Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of tools, given as names or as in a request. Raises ValueError for a tool without a name."""
    found = [each if isinstance(each, str) else (each.get("function") or each).get("name") for each in tools]
    if not all(found):
        raise ValueError("tools: a tool has no name")
    return tuple(map(str, found))


def text_of(content: object) -> str:
    """The text of a message's content; parts without text give their kind.

    >>> text_of([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:..."}}])
    'What is this?[image_url]'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = []
        for part in content:
            if not isinstance(part, Mapping):
                texts.append(str(part))
            else:
                texts.append(part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]")
        return "".join(texts)
    return json.dumps(content, ensure_ascii=False)


def calls_of(message: Message) -> Sequence[ToolCall]:
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
    """A result has failed if it has `is_error`, is an object with `error`, or begins with "error"."""
    content = text_of(message.get("content"))
    result = _arguments(content)
    failed = message.get("is_error") or message.get("status") == "error" or (result is not None and result.get("error"))
    return ToolResult(content, not failed and not content.lstrip().lower().startswith("error"))


ChatMessage = dict[str, Any]

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "developer": "system"}
_CALLS = frozenset({"tool_use", "tool_call"})
_THOUGHTS = frozenset({"thinking", "reasoning"})


def chat_messages(value: object) -> list[ChatMessage]:
    """Messages of a message, a chat completion (first choice), a text, or a list of these. Raises ValueError otherwise.

    A message of content blocks may become several: each tool result is a message, and a thought is `reasoning_content`.

    >>> chat_messages({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]})
    [{'role': 'assistant', 'content': '', 'reasoning_content': 'Hm.'}]
    >>> chat_messages("Hello.")
    [{'role': 'assistant', 'content': 'Hello.'}]
    """
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [message for each in value for message in chat_messages(each)]
    plain = plain_object(value)
    if isinstance(choices := plain.get("choices"), list) and choices:
        return chat_messages(plain_object(choices[0]).get("message"))
    role = plain.get("role") or plain.get("type")
    if not isinstance(role, str) or ("content" not in plain and "tool_calls" not in plain and "parts" not in plain):
        raise ValueError(f"{type(value).__name__} is no chat message: it has no role and content")
    message = {**plain, "role": _ROLES.get(role, role)}
    content = message.get("content")
    blocks = [plain_object(each) for each in content if not isinstance(each, str)] if isinstance(content, list) else []
    if not blocks:
        return [_own_part(message, content)]
    found: list[ChatMessage] = []
    for is_result, group in groupby(blocks, key=lambda each: each.get("type") == "tool_result"):
        grouped = list(group)
        if is_result:
            found += map(_tool_message, grouped)
        else:
            found.append(_own_part(message, grouped))
            message = {"role": message["role"]}  # its fields belong to the first part
    return found


def plain_object(thing: object) -> dict[str, Any]:
    """A JSON object from a mapping, a pydantic model, or an object with attributes. Raises ValueError."""
    if isinstance(thing, Mapping):
        return dict(thing)
    for way in ("model_dump", "to_dict"):
        if callable(make := getattr(thing, way, None)) and isinstance(read := make(), Mapping):
            return dict(read)
    if hasattr(thing, "__dict__"):
        return dict(vars(thing))
    raise ValueError(f"{type(thing).__name__} is no object of names and values")


def tool_call(name: object, arguments: object, call_id: object = "") -> ChatMessage:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False, default=str)
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def _own_part(message: ChatMessage, content: object) -> ChatMessage:
    role, listed = message["role"], message.get("tool_calls")
    blocks = content if isinstance(content, list) else []
    calls = []
    for each in map(plain_object, listed if isinstance(listed, list) else []):
        if each.get("function") is None:  # LangChain's
            calls.append(tool_call(each.get("name"), each.get("args") or each.get("arguments"), each.get("id")))
        else:
            named = plain_object(each["function"])
            calls.append(tool_call(named.get("name"), named.get("arguments"), each.get("id")))
    for each in blocks:
        if each.get("type") in _CALLS:
            calls.append(tool_call(each.get("name"), each.get("input", each.get("arguments")), each.get("id")))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    thoughts = [str(reasoning)] if isinstance(reasoning, str) else []
    for each in blocks:
        if each.get("type") in _THOUGHTS:
            thoughts.append(str(each.get("thinking") or each.get("content") or each.get("reasoning") or ""))
    thought = "\n".join(filter(None, thoughts))
    spoken = [each for each in blocks if each.get("type") not in _CALLS | _THOUGHTS]
    plain = all(each.get("type") == "text" for each in spoken)
    body: object = (text_of(spoken) if plain else spoken) if isinstance(content, list) else content
    made: ChatMessage = {"role": role, "content": body}
    if calls:
        made["tool_calls"] = calls
    if thought:
        made["reasoning_content"] = thought
    for name in ("name", "tool_call_id", "is_error"):
        # AgentScope and LangChain use these names in other roles too.
        if role == "tool" and message.get(name) is not None:
            made[name] = message[name]
    if role == "tool" and message.get("status") == "error":
        made["status"] = "error"
    return made


def _tool_message(block: ChatMessage) -> ChatMessage:
    output = block.get("output", block.get("content"))
    content = (
        text_of([(each if isinstance(each, str) else plain_object(each)) for each in output])
        if isinstance(output, list)
        else text_of(output)
    )
    made: ChatMessage = {"role": "tool", "content": content, "tool_call_id": str(block.get("id") or "")}
    if called := block.get("tool_use_id"):
        made["tool_call_id"] = str(called)
    if block.get("name"):
        made["name"] = str(block["name"])
    if block.get("is_error") or block.get("state") == "error":
        made["is_error"] = True
    return made
