"""Exchanges in JSON lines of OpenAI's formats: fine-tuning examples, and logged requests with their responses."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuneloop.runner.logs.broken import UNREADABLE, BrokenEntries
from tuneloop.runner.logs.exchange import (
    LoggedExchange,
    conversation_of,
    json_lines,
    labels_in,
    may_train,
    objects,
    optional_number,
    optional_text,
)
from tuneloop.runner.rewards.chat_messages import ChatMessage, chat_messages, plain_object

_REQUESTS = ("request", "body", "input")
_RESPONSES = ("response", "completion", "output")


def read_openai_jsonl(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """The exchanges of a file. A line that is none is put to `broken`; without that it raises LogRefused.

    A line is an example to fine-tune with, {"messages": [..., the assistant's]}; a logged call, {"request": ...,
    "response": ...}, where a response may stand as {"body": ...}, as in the files of OpenAI's batches; or the request's
    and the response's fields in one object, {"messages": [...], "choices": [...]}.
    """
    unread = broken if broken is not None else BrokenEntries(strict=True)
    for number, row in json_lines(path, unread):
        try:
            exchange = _exchange(row, str(path))
        except UNREADABLE as error:
            unread.add("no exchange", f"{path}:{number}", error)
        else:
            yield exchange


def _exchange(row: Mapping[str, Any], place: str) -> LoggedExchange:
    request = _part(row, _REQUESTS) or row
    response = _part(row, _RESPONSES) or (row if "choices" in row else {})
    if not isinstance(request.get("messages"), list):
        raise ValueError("it has no messages, and no request that has some")
    messages = tuple(chat_messages(request["messages"]))
    reply = tuple(chat_messages(response)) if response.get("choices") else ()
    example = not reply and bool(messages) and messages[-1]["role"] == "assistant"
    if example:
        messages, reply = messages[:-1], messages[-1:]
    if not messages:
        raise ValueError("it asks nothing")
    labels = labels_in(row.get("metadata")) | labels_in(request.get("metadata")) | labels_in(row)
    exchange_id = _name(row, response, messages + reply)
    return LoggedExchange(
        source="openai",
        place=place,
        exchange_id=exchange_id,
        conversation=conversation_of(labels, exchange_id),
        messages=messages,
        reply=reply,
        tools=objects(request.get("tools")),
        model=optional_text(response.get("model") or request.get("model")),
        at=optional_number(response.get("created")),
        user=optional_text(request.get("user") or row.get("user")),
        reward=optional_number(row.get("reward")),
        train=may_train(row, request),
        target=example and "msg_id" not in row,
        labels=labels,
    )


def _part(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """The request or the response of a row, which may be JSON text, or stand in an envelope with a body."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json.loads(value)
        if isinstance(value, Mapping):
            inner = value.get("body")
            return plain_object(inner if isinstance(inner, Mapping) else value)
    return None


def _name(row: Mapping[str, Any], response: Mapping[str, Any], transcript: tuple[ChatMessage, ...]) -> str:
    for where, name in ((row, "msg_id"), (response, "id"), (row, "id"), (row, "custom_id")):
        if named := optional_text(where.get(name)):
            return named
    # Its own words name it, so that a file that has grown names what it had before as before.
    return hashlib.sha256(json.dumps(transcript, sort_keys=True).encode()).hexdigest()[:16]
