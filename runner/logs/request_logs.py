"""Reads exchanges from OpenAI's file formats, from exports of a ledger, and from stored completions."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tuneloop.runner.errors import ServiceRefused
from tuneloop.runner.http_client import header_of_key
from tuneloop.runner.logs.exchange import (
    UNREADABLE,
    BrokenEntries,
    LoggedExchange,
    conversation_of,
    json_lines,
    json_value,
    labels_in,
    may_train,
    objects,
    optional_number,
    optional_text,
)
from tuneloop.runner.rewards.reply import ChatMessage, chat_messages, plain_object

_REQUESTS = ("request", "body", "input")
_RESPONSES = ("response", "completion", "output")


def read_openai_jsonl(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """Read the exchanges of a file. An invalid line goes to `broken`, without which it raises LogRefused.

    A line is a fine-tuning example {"messages": [..., the assistant's]}; a logged call {"request": ..., "response":
    ...}, whose response may be {"body": ...} as in batches of OpenAI; or request and response in one object.
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
        raise ValueError("it has no messages, and no request with messages")
    messages = tuple(chat_messages(request["messages"]))
    reply = tuple(chat_messages(response)) if response.get("choices") else ()
    example = not reply and bool(messages) and messages[-1]["role"] == "assistant"
    if example:
        messages, reply = messages[:-1], messages[-1:]
    if not messages:
        raise ValueError("it has no question")
    labels = labels_in(row.get("metadata")) | labels_in(request.get("metadata")) | labels_in(row)
    names = ((row, "msg_id"), (response, "id"), (row, "id"), (row, "custom_id"))
    # A digest of the content is stable when the file grows.
    words = hashlib.sha256(json.dumps(messages + reply, sort_keys=True).encode()).hexdigest()[:16]
    exchange_id = next((found for where, name in names if (found := optional_text(where.get(name)))), words)
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
    """The request or the response of a row, also as JSON text or in an envelope with a body."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json.loads(value)
        if isinstance(value, Mapping):
            inner = value.get("body")
            return plain_object(inner if isinstance(inner, Mapping) else value)
    return None


#: Reasons that keep a row out of training: the client's refusal, or comparing versions.
_KEPT_OUT = frozenset({"opt_out", "held_out", "side_request"})
_NO_REPLY = frozenset({"cut_off", "empty"})  # reasons why a row has no usable text

_PAGE = 100
_TIMEOUT_S = 30.0


def read_export(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """Read an exported file of JSON lines: `experiences`, `sft`, `dpo` or `kto`, recognised by their fields.

    Of `experiences`, only the newest correction of a choice counts, and rows without messages are skipped. An invalid
    line goes to `broken`, without which it raises LogRefused.
    """
    unread = broken if broken is not None else BrokenEntries(strict=True)
    last: tuple[str, int] | None = None
    waiting: LoggedExchange | None = None
    for number, row in json_lines(path, unread):
        try:
            # The corrections of one choice are adjacent; other formats have one row per answer.
            key = (str(row["msg_id"]), int(row["choice"])) if "prompt_ids" in row else ("", number)
            read = _of_row(row, str(path))
        except UNREADABLE as error:
            unread.add("no row of an export", f"{path}:{number}", f"not a row of an export: {error!r}")
            continue
        if waiting is not None and key != last:
            yield waiting
        waiting, last = read, key
    if waiting is not None:
        yield waiting


def _of_row(row: Mapping[str, Any], place: str) -> LoggedExchange | None:
    labels = labels_in(row)
    msg_id = str(row["msg_id"])
    common: dict[str, Any] = {
        "source": "tuneloop",
        "place": place,
        "exchange_id": msg_id,
        "conversation": conversation_of(labels, msg_id),
        "user": optional_text(row.get("user")),
        "reward": optional_number(row.get("reward")),
        "labels": labels,
    }
    if "prompt_ids" in row:
        if not row.get("messages"):
            return None
        request = json.loads(row["request"]) if isinstance(row.get("request"), str) else {}
        reason = row.get("reason")
        edits = [each["text"] for each in row.get("feedback") or () if each.get("kind") == "demonstration"]
        demonstration: list[ChatMessage] = []
        if edits and isinstance(edits[-1], str):  # the last correction
            edited = json_value(edits[-1])
            demonstration = chat_messages(edited if isinstance(edited, dict) and "role" in edited else edits[-1])
        message = {"role": "assistant", "content": row.get("text"), "tool_calls": list(objects(row.get("tool_calls")))}
        reply = chat_messages([] if reason in _NO_REPLY else {key: value for key, value in message.items() if value})
        many = f":{row['choice']}" if row.get("choice") else ""
        return LoggedExchange(
            messages=tuple(chat_messages(row["messages"])),
            reply=tuple(demonstration or reply),
            tools=objects(request.get("tools")),
            model=optional_text(request.get("model")),
            at=optional_number(row.get("sampled_at")),
            train=reason not in _KEPT_OUT and may_train(request),
            target=bool(demonstration),
            **common | {"exchange_id": common["exchange_id"] + many},
        )
    if "prompt" in row:
        chosen = row["chosen"] if "chosen" in row else row["completion"]
        good = "chosen" in row or bool(row["label"])
        prompt, reply = chat_messages(row["prompt"]), chat_messages(chosen) if good else []
    else:
        messages = chat_messages(row["messages"])
        prompt, reply = messages[:-1], messages[-1:]
    tools = objects(row.get("tools"))
    return LoggedExchange(messages=tuple(prompt), reply=tuple(reply), tools=tools, train=may_train(row), **common)


def read_stored_completions(
    url: str, *, api_key: str | None = None, metadata: Mapping[str, str] | None = None
) -> Iterator[LoggedExchange]:
    """Stored completions of a service with exactly this `metadata`, oldest first. Raises ServiceRefused."""
    base = f"{url.rstrip('/')}/v1/chat/completions"
    with httpx.Client(timeout=_TIMEOUT_S, headers=header_of_key(api_key)) as client:
        filters = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        for stored in _pages(client, base, filters):
            turns = stored_turns(client, f"{base}/{quote(str(stored['id']), safe='')}")
            labels = labels_in(stored.get("metadata"))
            choices = stored.get("choices") or []
            for choice in choices:
                many = f":{choice['index']}" if len(choices) > 1 and choice["index"] else ""
                yield LoggedExchange(
                    source="tuneloop",
                    place=url,
                    exchange_id=f"{stored['id']}{many}",
                    conversation=conversation_of(labels, str(stored["id"])),
                    messages=tuple(turns),
                    reply=tuple(chat_messages(choice["message"]) if choice.get("finish_reason") else []),
                    tools=objects(stored.get("tools")),
                    model=optional_text(stored.get("model")),
                    at=optional_number(stored.get("created")),
                    user=optional_text(stored.get("input_user")),
                    train=may_train(stored),
                    labels=labels,
                )


def stored_turns(client: httpx.Client, url: str) -> list[ChatMessage]:
    """The messages of the stored completion at a URL. Raises ServiceRefused."""
    listed = _pages(client, f"{url}/messages", {})
    return chat_messages([{**each, "content": each.get("content_parts") or each.get("content")} for each in listed])


def _pages(client: httpx.Client, url: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        page = ask_service(client, "GET", url, params={**query, **after, "limit": str(_PAGE), "order": "asc"})
        if not isinstance(page.get("data"), list):
            raise ServiceRefused(f"{url} answered with no list: {str(page)[:200]}")
        yield from page["data"]
        if not page.get("has_more") or not page["data"]:
            return
        after = {"after": str(page["data"][-1]["id"])}


def ask_service(client: httpx.Client, method: str, url: str, **how: Any) -> dict[str, Any]:
    """The object in a service's answer. Raises ServiceRefused."""
    try:
        answer = client.request(method, url, **how)
        read = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceRefused(f"the service does not answer: {url}: {error!r}") from None
    if not answer.is_success or not isinstance(read, dict):
        raise ServiceRefused.of_answer(answer.status_code, read)
    return read
