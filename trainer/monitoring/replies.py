"""What the newest replies say of the model: how many refuse, and how many of the tool calls are wrong."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuneloop.shared.ledger.versions.drift import ReplyExcerpt
from tuneloop.trainer.monitoring.drift import REFUSALS, TOOL_ERRORS

#: What begins a tool call in the text, if no parser could make one of it.
CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")

# The share of fewer replies says little.
_ENOUGH = 16


def signals(replies: Sequence[ReplyExcerpt], refusals: Sequence[re.Pattern[str]]) -> dict[str, float]:
    """The share of replies that refuse, and that of wrong ones among those that call tools; each only of enough."""
    refused = [refuses(reply.text, refusals) for reply in replies]
    wrong = [error for reply in replies if (error := tool_error(reply)) is not None]
    shares = {REFUSALS: refused, TOOL_ERRORS: wrong}
    return {name: sum(found) / len(found) for name, found in shares.items() if len(found) >= _ENOUGH}


def refuses(text: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether one of the patterns is found."""
    return any(pattern.search(text) for pattern in patterns)


def tool_error(reply: ReplyExcerpt) -> bool | None:
    """Whether a reply calls a tool wrongly; None if it calls none.

    Wrong is a call whose arguments are no JSON object, one of a tool that the request does not offer, and, where it
    offers some, the beginning of a call that stands in the text because no parser could read it.
    """
    offered = _offered_tools(reply.request)
    if reply.tool_calls is None:
        unread = bool(offered) and any(mark in reply.text for mark in CALL_MARKS)
        return True if unread else None
    calls = _json(reply.tool_calls)
    if not isinstance(calls, list) or not calls:
        return None
    return any(_is_wrong(call, offered) for call in calls)


def _is_wrong(call: object, offered: set[str] | None) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return True
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments)
    unknown = offered is not None and function.get("name") not in offered
    return unknown or not isinstance(arguments, dict)


def _offered_tools(request: bytes | None) -> set[str] | None:
    """The names of the tools that the request offers, in any of the dialects; None if it cannot be read."""
    body = None if request is None else _json(request)
    if not isinstance(body, dict):
        return None
    tools = [*_objects(body.get("tools")), *_objects(body.get("functions"))]
    names = [_tool_name(tool) for tool in tools]
    return {name for name in names if isinstance(name, str)}


def _tool_name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _json(text: str | bytes) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
