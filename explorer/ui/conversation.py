"""Reads a stored request for people, whichever route it came to: what was said, the tools, the parameters."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

#: What is said or offered, and so no parameter.
_SAID = frozenset({"messages", "prompt", "input", "system", "instructions", "tools", "metadata"})


class MessageView(NamedTuple):
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
    body = _decode(request)
    if not isinstance(body, dict):
        return request.decode(errors="replace")[:most]
    *_, last = None, *_turns(body)
    return last.text[:most] if last else ""


def pretty(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def compact(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_calls(tool_calls: bytes | None) -> str:
    return "" if not tool_calls else pretty(_decode(tool_calls))


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data.decode(errors="replace")


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
