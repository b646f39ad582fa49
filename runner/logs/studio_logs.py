"""Exchanges in the spans of AgentScope Studio's database."""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import (
    UNREADABLE,
    BrokenEntries,
    LoggedExchange,
    json_value,
    may_train,
    objects,
    optional_text,
)
from tuneloop.runner.rewards.reply import ChatMessage, chat_messages, text_of, tool_call

_CHATS = frozenset({"chat", "chat_model", "generate_content"})
_MEDIA = frozenset({"uri", "blob", "file", "image", "audio", "video"})
_ERROR = 2  # OpenTelemetry's code of a span that failed

#: The columns of Studio's table of spans that are read. `id` is `spanId` in releases before 1.0.8, which have none.
_TABLE = "span_table"
_NEEDED = {"traceId", "attributes"}

#: Values that are objects themselves and no names with dots.
_WHOLE = frozenset({"agentscope.function.input", "agentscope.function.output", "gen_ai.tool.call.arguments"})


def read_studio(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """The chats in AgentScope Studio's database, which is only read. An opt-out of any span holds for its trace.

    A span that cannot be read is put to `broken`; without that it raises LogRefused, as for a file without spans.
    """
    unread = broken if broken is not None else BrokenEntries(strict=True)
    opted_out = set()
    for _, row in _rows(path):
        with suppress(*UNREADABLE):  # counted where its messages are read
            attributes, resource = (
                _attributes(row),
                _flat((json_value(row.get("resource")) or {}).get("attributes") or {}),
            )
            if not may_train(attributes, {"metadata": json_value(attributes.get("metadata"))}, resource):
                opted_out.add(str(row["traceId"]))
    for where, row in _rows(path):
        try:
            exchange = _exchange(row, str(path))
        except UNREADABLE as error:
            unread.add("broken span", where, error if isinstance(error, ValueError) else repr(error))
            continue
        if exchange is not None:
            yield replace(exchange, train=False) if str(row["traceId"]) in opted_out else exchange


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise LogRefused(f"{path}: there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            # A damaged text spoils its row only: what is no UTF-8 in it makes no JSON, or a broken character.
            database.text_factory = lambda stored: stored.decode(errors="replace")
            columns = {row["name"] for row in database.execute(f"PRAGMA table_info({_TABLE})")}
            if not columns >= _NEEDED:
                raise LogRefused(f"{path}: no table {_TABLE} with {', '.join(sorted(_NEEDED))}")
            order = next((each for each in ("startTimeUnixNano", "startTime") if each in columns), "rowid")
            rows = database.execute(f"SELECT rowid AS place_, * FROM {_TABLE} ORDER BY {order}, rowid")
            yield from ((f"{path}: {_TABLE} row {row['place_']}", dict(row)) for row in rows)
    except sqlite3.DatabaseError as error:
        raise LogRefused(f"{path}: {error}") from None


def _exchange(row: Mapping[str, Any], place: str) -> LoggedExchange | None:
    """The exchange that a chat span tells of; None for other spans. Raises one of UNREADABLE."""
    attributes, trace = _attributes(row), str(row["traceId"])
    if attributes.get("gen_ai.operation.name") not in _CHATS:
        return None
    question, reply = _messages(attributes)
    if not any(each["role"] == "user" for each in question):
        return None
    run = optional_text(attributes.get("gen_ai.conversation.id")) or trace
    failed = (json_value(row.get("status")) or {}).get("code") == _ERROR
    models = ("gen_ai.request.model", "gen_ai.response.model")
    return LoggedExchange(
        source="studio",
        place=place,
        exchange_id=str(row.get("spanId") or row.get("id")),
        # A conversation may last for days of many users' traces; what continues what is found within a trace.
        conversation=f"{run}/{trace}",
        messages=tuple(question),
        reply=() if failed else tuple(reply[:1]),
        tools=tuple(  # as OpenAI has them: the conventions have them flat
            each
            if "function" in each
            else {"type": "function", "function": {key: value for key, value in each.items() if key != "type"}}
            for each in objects(attributes.get("gen_ai.tool.definitions"))
        ),
        model=next((found for name in models if (found := optional_text(attributes.get(name)))), None),
        at=_seconds(row.get("startTimeUnixNano")),
        user=optional_text(attributes.get("user.id") or attributes.get("enduser.id")),
        labels={"run_id": run},
    )


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    stored = row["attributes"]
    attributes = _flat((json.loads(stored) if isinstance(stored, str) else stored) or {})
    for column, name in (("operationName", "gen_ai.operation.name"), ("conversationId", "gen_ai.conversation.id")):
        if row.get(column):
            attributes.setdefault(name, row[column])
    return attributes


def _messages(attributes: Mapping[str, Any]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """What was asked and what was answered, by OpenTelemetry's conventions or among the model's arguments."""
    question, reply = _of_parts(attributes, "input"), _of_parts(attributes, "output")
    given = attributes.get("agentscope.function.input")
    if question or given is None:
        return question, reply
    call = json.loads(given) if isinstance(given, str) else given
    named, listed = (call.get("kwargs") or {}, call.get("args") or []) if isinstance(call, Mapping) else ({}, [])
    messages = named.get("messages") if isinstance(named, Mapping) else None
    found = messages or next((each for each in listed if isinstance(each, list)), [])
    return chat_messages([each for each in found if isinstance(each, Mapping)]), reply


def _of_parts(attributes: Mapping[str, Any], side: str) -> list[ChatMessage]:
    system = _parts(objects(attributes.get("gen_ai.system_instructions")), "system") if side == "input" else []
    # The objects of a list. Raises ValueError for a text that is no JSON: it was cut off.
    name = f"gen_ai.{side}.messages"
    value = attributes.get(name)
    if isinstance(value, str) and value.strip():
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON: {error}") from None
    listed = objects(value)
    return [message for message in system if message["content"]] + [
        message
        for each in listed
        for message in _parts(objects(each.get("parts")), str(each.get("role") or "user"), each)
    ]


def _parts(parts: Sequence[Mapping[str, Any]], role: str, whole: Mapping[str, Any] | None = None) -> list[ChatMessage]:
    if not parts and whole is not None and isinstance(whole.get("content"), str):
        parts = [{"type": "text", "content": whole["content"]}]
    made: list[ChatMessage] = []
    # AgentScope 2.x has a call, its result and what was said then in one message.
    for is_result, group in groupby(parts, key=lambda each: each.get("type") == "tool_call_response"):
        grouped = list(group)
        if is_result:
            made += map(_result, grouped)
            continue
        calls = [
            tool_call(each.get("name"), each.get("arguments"), each.get("id")) for each in _kind(grouped, "tool_call")
        ]
        thought = "\n".join(str(each.get("content", "")) for each in _kind(grouped, "reasoning"))
        texts = [
            f"[{each.get('modality') or each['type']}]" if each.get("type") in _MEDIA else str(each.get("content", ""))
            for each in grouped
            if each.get("type") in _MEDIA or each.get("type") == "text"
        ]
        message: ChatMessage = {"role": role, "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": thought} if thought else {}
        made.append(message)
    return made or [{"role": role, "content": ""}]


def _kind(parts: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in parts if each.get("type") == kind)


def _result(part: Mapping[str, Any]) -> ChatMessage:
    result = part.get("response", part.get("result", part.get("content")))
    blocks = objects(result)  # AgentScope's, as JSON text
    if blocks and all(isinstance(each.get("text"), str) for each in blocks):
        result = text_of(blocks)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "content": text, "tool_call_id": str(part.get("id") or "")}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Attributes by their dotted names: some releases store {"gen_ai": {"operation": {"name": "chat"}}}.

    >>> _flat({"gen_ai": {"operation": {"name": "chat"}}, "a.b": 1})
    {'gen_ai.operation.name': 'chat', 'a.b': 1}
    """
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and name not in _WHOLE else {name: value}
    return found


def _seconds(nanoseconds: object) -> float | None:
    try:
        return int(str(nanoseconds)) / 1e9
    except (ValueError, OverflowError):
        return None
