"""Chats in the attributes of OpenInference, as Phoenix, Arize and its instrumentations have them. Pure.

Their lists are flattened: `llm.input_messages.0.message.role`, `llm.output_messages.0.message.contents.1...`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tuneloop.runner.logs.exchange import json_value, objects
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages, tool_call
from tuneloop.runner.rewards.reply import text_of

_KIND = "openinference.span.kind"

#: What stands for a text that its settings hide.
_HIDDEN = "__REDACTED__"

#: Contents that say again what stands in the message's own fields.
_ELSEWHERE = frozenset({"tool_use", "tool_call", "tool_result"})


def is_chat(attributes: Mapping[str, Any]) -> bool:
    """Whether it is the span of a model's call.

    >>> is_chat({"openinference.span.kind": "LLM"}), is_chat({"openinference.span.kind": "TOOL"})
    (True, False)
    """
    return str(attributes.get(_KIND)).upper() == "LLM"


def messages_of(attributes: Mapping[str, Any], side: str) -> list[ChatMessage]:
    """The messages of a side, `input` or `output`; none where their texts were hidden.

    Raises ValueError where one is missing, or has no role.
    """
    found = []
    for at, fields in enumerate(items_of(attributes, f"llm.{side}_messages")):
        message = fields.get("message")
        if not isinstance(message, Mapping) or not message.get("role"):
            raise ValueError(f"llm.{side}_messages.{at} has no role")
        found += chat_messages(_message(message))
    return [] if any(text_of(each["content"]) == _HIDDEN for each in found) else found


def tools_of(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that were offered, as OpenAI has them; what is no JSON schema is left out."""
    found = []
    for fields in items_of(attributes, "llm.tools"):
        tool = fields.get("tool")
        for each in objects([json_value(tool.get("json_schema"))] if isinstance(tool, Mapping) else []):
            if "function" in each:
                found.append(each)
            elif each.get("name"):  # Anthropic's
                schema = {"parameters": each.get("input_schema") or each.get("parameters") or {"type": "object"}}
                about = {name: each[name] for name in ("name", "description") if name in each}
                found.append({"type": "function", "function": about | schema})
    return tuple(found)


def items_of(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """A list of objects that was flattened. Raises ValueError for a hole in it.

    >>> items_of({"a.0.b.c": 1, "a.0.b.d": 2, "a.1.b.c": 3}, "a")
    [{'b': {'c': 1, 'd': 2}}, {'b': {'c': 3}}]
    """
    nested: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            _put(nested, key.removeprefix(f"{prefix}.").split("."), value)
    return _as_list(nested, prefix)


def _put(nested: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        inner = nested.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(path)} stands twice")
        nested = inner
    nested[path[-1]] = value


def _as_list(nested: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(nested, Mapping):
        return []
    if set(nested) != {str(at) for at in range(len(nested))}:
        raise ValueError(f"{name} is not whole: it has {', '.join(sorted(nested)[:5])} only")
    return [each for at in range(len(nested)) if isinstance(each := nested[str(at)], dict)]


def _message(fields: Mapping[str, Any]) -> ChatMessage:
    """The message as OpenAI has it."""
    parts = [_part(each) for each in _as_list(fields.get("contents", {}), "message.contents")]
    said = [each for each in parts if each["type"] not in _ELSEWHERE]
    message: ChatMessage = {"role": str(fields["role"]), "content": said or fields.get("content") or ""}
    calls = [each.get("tool_call", {}) for each in _as_list(fields.get("tool_calls", {}), "message.tool_calls")]
    named = [(each.get("function", {}), each.get("id")) for each in calls]
    made = [tool_call(function.get("name"), function.get("arguments"), name) for function, name in named]
    if not made and fields.get("function_call_name"):
        made = [tool_call(fields["function_call_name"], fields.get("function_call_arguments_json"))]
    if made:
        message["tool_calls"] = made
    for name in ("name", "tool_call_id", "reasoning_content"):
        if fields.get(name):
            message[name] = fields[name]
    return message


def _part(fields: Mapping[str, Any]) -> dict[str, Any]:
    content = fields.get("message_content")
    inner = content if isinstance(content, Mapping) else {}
    kind = str(inner.get("type") or "text")
    if kind == "text":
        return {"type": "text", "text": str(inner.get("text") or "")}
    if kind == "reasoning":
        return {"type": "reasoning", "reasoning": str(inner.get("text") or "")}
    image = inner.get("image")
    if kind == "image" and isinstance(image, Mapping) and isinstance(image.get("image"), Mapping):
        return {"type": "image_url", "image_url": {"url": str(image["image"].get("url") or "")}}
    return {"type": kind}
