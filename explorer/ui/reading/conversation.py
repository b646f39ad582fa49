"""Reads a stored request for people, whichever route it came to: what was said, the tools, the parameters."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

#: What is said or offered, and so no parameter.
_SAID = frozenset({"messages", "prompt", "input", "system", "instructions", "tools", "metadata"})

_NULL = msgspec.Raw(b"null")


class _TurnFields(msgspec.Struct):
    """Where a request may have what was said last, not parsed."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instructions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    system: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Turn(msgspec.Struct):
    content: msgspec.Raw = _NULL


class _Part(msgspec.Struct):
    text: msgspec.Raw = _NULL


class MessageView(NamedTuple):
    """A message of a request; `more` is what it has beside text, as JSON."""

    role: str
    text: str
    more: str


class RequestView(NamedTuple):
    """A request; `tools` are names and definitions, `parameters` names and JSON."""

    turns: list[MessageView]
    tools: list[tuple[str, str]]
    parameters: list[tuple[str, str]]


def read_request(request: bytes) -> RequestView:
    """What a request says. Never raises: a request that was imported may be anything."""
    body = _decode(request)
    if not isinstance(body, dict):
        return RequestView([MessageView("request", request.decode(errors="replace"), "")], [], [])
    tools = body.get("tools")
    named = [(_tool_name(each), pretty(each)) for each in tools] if isinstance(tools, list) else []
    parameters = [(str(name), compact(value)) for name, value in body.items() if name not in _SAID]
    return RequestView(list(_turns(body)), named, parameters)


def last_words(request: bytes, most: int) -> str:
    """The first `most` characters of what was said last, for a list. Only that is parsed."""
    try:
        said = msgspec.json.decode(request, type=_TurnFields)
        messages = said.input if said.messages is msgspec.UNSET else said.messages
        for each in reversed(_items(messages)):
            if _first(each) != b"n":
                return _beginning(each, most)
        for other in (said.prompt, said.instructions, said.system):
            if other is not msgspec.UNSET and (text := _beginning(other, most)):
                return text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _start_of(request, most)
    return ""


def pretty(value: object) -> str:
    """JSON for people."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def compact(value: object) -> str:
    """JSON on one line, or the text itself."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_calls(tool_calls: bytes | None) -> str:
    """The tool calls of a reply, for people."""
    return "" if not tool_calls else pretty(_decode(tool_calls))


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data.decode(errors="replace")


def _first(value: msgspec.Raw) -> bytes:
    return bytes(memoryview(value)[:1])


def _items(value: msgspec.Raw | msgspec.UnsetType) -> list[msgspec.Raw]:
    if value is msgspec.UNSET:
        return []
    return msgspec.json.decode(value, type=list[msgspec.Raw]) if _first(value) == b"[" else [value]


def _beginning(turn: msgspec.Raw, most: int) -> str:
    """What `_text` says of a turn, or of its content, as far as it is shown; what is no text stands as it was sent."""
    content = msgspec.json.decode(turn, type=_Turn).content if _first(turn) == b"{" else turn
    match _first(content):
        case b"n":
            return ""
        case b'"':
            return msgspec.json.decode(content, type=str)[:most]
        case b"[":
            parts = _items(content)
            texts = [msgspec.json.decode(each, type=_Part).text for each in parts if _first(each) == b"{"]
            spoken = [msgspec.json.decode(each, type=str) for each in texts if _first(each) == b'"']
            if spoken or len(texts) == len(parts):
                return "\n".join(spoken)[:most]
    return _start_of(memoryview(content), most)


def _start_of(data: bytes | memoryview, most: int) -> str:
    """The first `most` characters, each of which takes four bytes at most."""
    return bytes(data[: 4 * most]).decode(errors="replace")[:most]


def _turns(body: dict[str, Any]) -> Iterator[MessageView]:
    for name in ("system", "instructions"):
        if body.get(name):
            yield MessageView("system", _text(body[name]), "")
    if "prompt" in body:
        yield MessageView("prompt", _text(body["prompt"]), "")
    turns = body.get("messages", body.get("input"))
    for each in turns if isinstance(turns, list) else [turns]:
        if isinstance(each, dict):
            more = {key: value for key, value in each.items() if key not in {"role", "content"} and value is not None}
            content, parts = each.get("content"), {}
            if isinstance(content, list):
                others = [
                    part for part in content if not (isinstance(part, dict) and isinstance(part.get("text"), str))
                ]
                parts = {"content": others} if others else {}
            yield MessageView(
                str(each.get("role", each.get("type", "message"))),
                _text(content),
                pretty(more | parts) if more or parts else "",
            )
        elif each is not None:
            yield MessageView("user", _text(each), "")


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return "\n".join(texts) if texts or all(isinstance(part, dict) for part in content) else compact(content)
    return compact(content)


def _tool_name(tool: object) -> str:
    if not isinstance(tool, dict):
        return "tool"
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return str(name or tool.get("type", "tool"))
