"""Recognises what agents and chat interfaces ask beside the conversation, and who they say asks.

A request for a title, tags, suggestions or a summary has the run's labels, and what is said of the run is not about it.
Clients have no mark for it, so it is known by the words that they send, or by one of their fields.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

#: What an instruction, or the last message, begins with, of six clients.
_WORDS = re.compile(
    r"(CRITICAL: Respond with TEXT ONLY.{0,400})?Your task is to create a detailed summary of"
    r"|\[SUGGESTION MODE:"
    r"|The user stepped away and is coming back"
    r"|Generate a (concise, (single-line task|technical issue|sentence-case) title|short kebab-case name)"
    r"|You are performing a CONTEXT CHECKPOINT COMPACTION"
    r"|You are a title generator"
    r"|You are the component that summarizes internal chat history"
    r"|Provide a concise, 5-word-or-less title for the conversation"
    r"|### Task:\s+(Generate|Suggest|Analyze the chat history|You are an autocompletion)",
    re.DOTALL,
)

#: Claude Code's helpers answer in one field of JSON, and have no tools.
_CLAUDE_CODE, _BILLING = "claude-cli/", "x-anthropic-billing-header"
_FIELDS = frozenset({"title", "name", "isNewTopic"})

#: Where Codex names the purpose of a request; of its conversation it is `turn`.
_CODEX, _KIND, _TURN = "x-codex-turn-metadata", "request_kind", "turn"

#: What older releases of Claude Code call a user.
_CLAUDE_USER = re.compile(r"(user_[0-9a-f]+)_account_.*_session_.+")


def is_side_request(body: Mapping[str, Any], chat: Mapping[str, Any], user_agent: str) -> bool:
    told = body.get("client_metadata")
    if isinstance(told, dict) and isinstance(written := told.get(_CODEX), str):
        try:
            return bool(orjson.loads(written).get(_KIND, _TURN) != _TURN)
        except (orjson.JSONDecodeError, AttributeError):
            return False
    messages = chat.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return False
    instructions = [text for each in messages if each.get("role") in ("system", "developer") for text in _texts(each)]
    asked = _texts(messages[-1]) if messages and messages[-1].get("role") == "user" else []
    if any(_WORDS.match(text.lstrip()) for text in (*instructions, *asked)):
        return True
    system = body.get("system")
    first = system[0].get("text") if isinstance(system, list) and system and isinstance(system[0], dict) else ""
    if chat.get("tools") or not (user_agent.startswith(_CLAUDE_CODE) or str(first).startswith(_BILLING)):
        return False
    form = chat.get("response_format")
    shape = form.get("json_schema") if isinstance(form, dict) else None
    schema = shape.get("schema") if isinstance(shape, dict) else None
    fields = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(fields, dict) and bool(fields) and fields.keys() <= _FIELDS


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]


def device_of(user: str) -> str:
    """Who a user is from session to session: Claude Code's device, of what it names each session by."""
    if older := _CLAUDE_USER.fullmatch(user):
        return older[1]
    if not user.startswith("{"):
        return user
    try:
        told = orjson.loads(user)
    except orjson.JSONDecodeError:
        return user
    device = told.get("device_id") if "session_id" in told else None
    return device if device and isinstance(device, str) else user
