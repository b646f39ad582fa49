"""Chat messages, as JSON, of what clients and frameworks hand out: openai, Anthropic, AgentScope, LangChain, dicts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tuneloop.runner.rewards.reply import text_of

ChatMessage = dict[str, Any]

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "developer": "system"}
_CALLS = frozenset({"tool_use", "tool_call"})
_THOUGHTS = frozenset({"thinking", "reasoning"})


def chat_messages(value: object) -> list[ChatMessage]:
    """The messages of a message, of a chat completion (its first choice), of a text, or of a list of these.

    A message of content blocks becomes as many as it holds: each tool's result is a message of its own, and what a
    model thought stands under `reasoning_content`. Raises ValueError for anything else.

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
    return list(_split({**plain, "role": _ROLES.get(role, role)}))


def plain_object(thing: object) -> dict[str, Any]:
    """A JSON object of a mapping, a pydantic model, or an object with attributes. Raises ValueError if it is none."""
    if isinstance(thing, Mapping):
        return dict(thing)
    for way in ("model_dump", "to_dict"):
        if callable(make := getattr(thing, way, None)) and isinstance(read := make(), Mapping):
            return dict(read)
    if hasattr(thing, "__dict__"):
        return dict(vars(thing))
    raise ValueError(f"{type(thing).__name__} is no object of names and values")


def arguments_text(arguments: object) -> str:
    """A tool call's arguments as OpenAI has them, JSON text.

    >>> arguments_text({"q": "invoice"})
    '{"q": "invoice"}'
    """
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, default=str)


def tool_call(name: object, arguments: object, call_id: object = "") -> ChatMessage:
    """A tool call as OpenAI's messages have it."""
    function = {"name": str(name or ""), "arguments": arguments_text(arguments)}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def _split(message: ChatMessage) -> Iterator[ChatMessage]:
    """The message of a role, and the results of tools among its blocks, each a message of its own, in their order."""
    role, content = message["role"], message.get("content")
    blocks = [plain_object(each) for each in content if not isinstance(each, str)] if isinstance(content, list) else []
    if not blocks:
        yield _own_part(message, role, content)
        return
    for is_result, group in groupby(blocks, key=lambda each: each.get("type") == "tool_result"):
        grouped = list(group)
        if is_result:
            yield from map(_tool_message, grouped)
        else:
            yield _own_part(message, role, grouped)
            message = {"role": role}  # its own fields belong to the first part only


def _own_part(message: ChatMessage, role: str, content: object) -> ChatMessage:
    blocks = content if isinstance(content, list) else []
    calls = [*_listed_calls(message), *(_block_call(each) for each in blocks if each.get("type") in _CALLS)]
    thought = _reasoning(message, blocks)
    spoken = [each for each in blocks if each.get("type") not in _CALLS | _THOUGHTS]
    plain = all(each.get("type") == "text" for each in spoken)
    body: object = (text_of(spoken) if plain else spoken) if isinstance(content, list) else content
    made: ChatMessage = {"role": role, "content": body}
    if calls:
        made["tool_calls"] = calls
    if thought:
        made["reasoning_content"] = thought
    for name in ("name", "tool_call_id", "is_error"):
        # AgentScope's messages and LangChain's have more fields of these names than OpenAI's.
        if role == "tool" and message.get(name) is not None:
            made[name] = message[name]
    if role == "tool" and message.get("status") == "error":
        made["status"] = "error"
    return made


def _listed_calls(message: ChatMessage) -> Iterator[ChatMessage]:
    listed = message.get("tool_calls")
    for each in listed if isinstance(listed, list) else []:
        call = plain_object(each)
        function = call.get("function")
        if function is None:  # LangChain's
            yield tool_call(call.get("name"), call.get("args") or call.get("arguments"), call.get("id"))
        else:
            named = plain_object(function)
            yield tool_call(named.get("name"), named.get("arguments"), call.get("id"))


def _block_call(block: ChatMessage) -> ChatMessage:
    return tool_call(block.get("name"), block.get("input", block.get("arguments")), block.get("id"))


def _reasoning(message: ChatMessage, blocks: Sequence[ChatMessage]) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    thoughts = [str(reasoning)] if isinstance(reasoning, str) else []
    for each in blocks:
        if each.get("type") in _THOUGHTS:
            thoughts.append(str(each.get("thinking") or each.get("content") or each.get("reasoning") or ""))
    return "\n".join(filter(None, thoughts))


def _tool_message(block: ChatMessage) -> ChatMessage:
    output = block.get("output", block.get("content"))
    content = text_of([_plain(each) for each in output]) if isinstance(output, list) else text_of(output)
    made: ChatMessage = {"role": "tool", "content": content, "tool_call_id": str(block.get("id") or "")}
    if called := block.get("tool_use_id"):
        made["tool_call_id"] = str(called)
    if block.get("name"):
        made["name"] = str(block["name"])
    if block.get("is_error") or block.get("state") == "error":
        made["is_error"] = True
    return made


def _plain(part: object) -> object:
    return part if isinstance(part, str) else plain_object(part)
