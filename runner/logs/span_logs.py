"""Exchanges in spans: OpenTelemetry's (OTLP as JSON), and the database of AgentScope Studio."""

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import (
    UNREADABLE,
    BrokenEntries,
    LoggedExchange,
    json_lines,
    json_value,
    may_train,
    objects,
    optional_text,
)
from tuneloop.runner.rewards.reply import ChatMessage, chat_messages, text_of, tool_call

_CHATS = frozenset({"chat", "chat_model", "generate_content"})
_MEDIA = frozenset({"uri", "blob", "file", "image", "audio", "video"})
_DROPPED = "of its attributes or events were left out when it was written"
_DETAILS = "gen_ai.client.inference.operation.details"
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GenAiSpan:
    """A span: its attributes by their dotted names, and its events, each a name with attributes. Times in seconds.

    `dropped` is how many attributes and events whoever wrote it left out.
    """

    span_id: str
    trace_id: str
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    start: float | None = None
    failed: bool = False
    resource: Mapping[str, Any] = field(default_factory=dict)
    dropped: int = 0

    @property
    def may_train(self) -> bool:
        """Whether nobody said no, on the span or on what wrote it."""
        return may_train(self.attributes, {"metadata": json_value(self.attributes.get("metadata"))}, self.resource)


def exchange_of_span(span: GenAiSpan, *, source: str, place: str) -> LoggedExchange | None:
    """The exchange that a chat span tells of; None for other spans. Raises one of UNREADABLE."""
    kind = span.attributes.get("gen_ai.operation.name")
    if kind not in _CHATS:
        if span.dropped and kind is None and any(name.startswith("gen_ai.") for name in span.attributes):
            raise ValueError(f"{span.dropped} {_DROPPED}: its kind is not known")
        return None
    if span.dropped:
        # Whoever writes it keeps 128 attributes by default, and a long conversation, flattened, has more. An opt-out
        # may be among those that were left out.
        raise ValueError(f"{span.dropped} {_DROPPED}: it is not whole")
    details: Mapping[str, Any] = next((fields for name, fields in span.events if name == _DETAILS), {})
    attributes = {**details, **span.attributes}
    question, reply = _messages(attributes, span.events)
    if not any(each["role"] == "user" for each in question):
        return None
    run = optional_text(attributes.get("gen_ai.conversation.id")) or span.trace_id
    models = ("gen_ai.request.model", "gen_ai.response.model")
    return LoggedExchange(
        source=source,
        place=place,
        exchange_id=span.span_id,
        # A conversation may last for days of many users' traces; what continues what is found within a trace.
        conversation=f"{run}/{span.trace_id}",
        messages=tuple(question),
        reply=() if span.failed else tuple(reply[:1]),
        tools=tuple(  # as OpenAI has them: the conventions have them flat
            each
            if "function" in each
            else {"type": "function", "function": {key: value for key, value in each.items() if key != "type"}}
            for each in objects(attributes.get("gen_ai.tool.definitions"))
        ),
        model=next((found for name in models if (found := optional_text(attributes.get(name)))), None),
        at=span.start,
        user=optional_text(attributes.get("user.id") or attributes.get("enduser.id")),
        train=span.may_train and may_train(details),
        labels={"run_id": run},
    )


def _messages(
    attributes: Mapping[str, Any], events: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """What was asked and what was answered, from whichever of the three ways was used."""
    question, reply = _of_parts(attributes, "input"), _of_parts(attributes, "output")
    if question:
        return question, reply
    given = attributes.get("agentscope.function.input")
    if given is not None:  # the messages among the arguments of AgentScope's model
        call = json.loads(given) if isinstance(given, str) else given
        if not isinstance(call, Mapping):
            return [], reply
        named, listed = call.get("kwargs") or {}, call.get("args") or []
        messages = named.get("messages") if isinstance(named, Mapping) else None
        found = messages or next((each for each in listed if isinstance(each, list)), [])
        return chat_messages([each for each in found if isinstance(each, Mapping)]), reply
    question, reply = [], []
    for name, fields in events:
        if of_role := _EVENT(name):
            question += chat_messages(_event_message(fields, of_role[1]))
        elif name == "gen_ai.choice":
            value = fields.get("message")
            read = json.loads(value) if isinstance(value, str) else value
            message = dict(read) if isinstance(read, Mapping) else {}
            reply += chat_messages(_event_message({**fields, **message}, "assistant"))
    return question, reply


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


def _event_message(fields: Mapping[str, Any], role: str) -> ChatMessage:
    message: ChatMessage = {"role": role, "content": fields.get("content") or ""}
    if calls := objects(fields.get("tool_calls")):
        message["tool_calls"] = list(calls)
    if role == "tool" and fields.get("id"):
        message["tool_call_id"] = fields["id"]
    return message


#: What was told of a span, in its order, by trace and span.
_EventsBySpan = Mapping[tuple[str, str], list[tuple[str, dict[str, Any]]]]

#: What the lines of a file are; a collector may write all of them into one.
_SIGNALS = ("resourceSpans", "resourceLogs", "resourceMetrics")

_SPANS = ("resourceSpans", "scopeSpans", "spans")
_RECORDS = ("resourceLogs", "scopeLogs", "logRecords")

_ERROR = 2  # OpenTelemetry's code of a span that failed

#: The columns of Studio's table of spans that are read. `id` is `spanId` in releases before 1.0.8, which have none.
_STUDIO_TABLE = "span_table"
_STUDIO_NEEDS = {"traceId", "attributes"}

#: Values that are objects themselves and no names with dots.
_WHOLE = frozenset({"agentscope.function.input", "agentscope.function.output", "gen_ai.tool.call.arguments"})


def read_otlp(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """The chats in a file of OTLP as JSON, whole or one object a line. An opt-out of any span holds for its trace."""
    unread = broken if broken is not None else BrokenEntries(strict=True)
    events, opted_out = _read_ahead(path, unread)
    counted = BrokenEntries()  # of what was counted already when the file was read ahead
    for where, batch in _batches(path, counted):
        for at, raw, resource in _leaves(batch, _SPANS, f"{where}: span", counted):
            try:
                span = _otlp_span(raw, resource, events)
                exchange = exchange_of_span(span, source="otel", place=str(path))
            except UNREADABLE as error:
                unread.add("broken span", at, _sentence(error))
                continue
            if exchange is not None:
                yield replace(exchange, train=False) if span.trace_id in opted_out else exchange


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)


def _batches(path: Path, broken: BrokenEntries) -> Iterator[tuple[str, dict[str, Any]]]:
    lines: Iterable[tuple[str, Any]]
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise LogRefused(f"{path}: {error}") from None
    except (ValueError, RecursionError):
        lines = ((f"{path}:{number}", batch) for number, batch in json_lines(path, broken))
    else:
        lines = ((str(path), batch) for batch in (whole if isinstance(whole, list) else [whole]))
    for where, batch in lines:
        if isinstance(batch, dict) and any(isinstance(batch.get(each), list) for each in _SIGNALS):
            yield where, batch
        else:
            broken.add("no OTLP", where, f"none of {', '.join(_SIGNALS)}: this is not an OTLP file")


def _read_ahead(path: Path, broken: BrokenEntries) -> tuple[_EventsBySpan, frozenset[str]]:
    """What must be known of a whole file before its first span is: events that are log records, and opt-outs."""
    found: defaultdict[tuple[str, str], list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    opted_out: set[str] = set()
    for where, batch in _batches(path, broken):
        for at, record, _ in _leaves(batch, _RECORDS, f"{where}: log record", broken):
            try:
                fields = _attributes(record.get("attributes"))
                name = record.get("eventName") or fields.get("event.name")
                body = _value(record.get("body") or {})
                if name and record.get("spanId"):
                    event = {**fields, **(body if isinstance(body, dict) else {})}
                    time = int(record.get("timeUnixNano") or record.get("observedTimeUnixNano") or 0)
                    found[str(record.get("traceId")), str(record["spanId"])].append((time, str(name), event))
            except UNREADABLE as error:
                broken.add("broken log record", at, _sentence(error))
        for _, raw, resource in _leaves(batch, _SPANS, f"{where}: span", broken):
            with suppress(*UNREADABLE):  # counted where its messages are read
                if not (span := _otlp_span(raw, resource, {})).may_train:
                    opted_out.add(span.trace_id)
    events = {
        span: [(name, fields) for _, name, fields in sorted(listed, key=lambda each: each[0])]
        for span, listed in found.items()
    }
    return events, frozenset(opted_out)


def _leaves(
    batch: Mapping[str, Any], names: tuple[str, str, str], where: str, broken: BrokenEntries
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Each span or record, by its number in the batch, with the attributes of what wrote it."""
    number = 0
    for of_resource in _items(batch.get(names[0]), where, broken):
        try:
            resource = _attributes((of_resource.get("resource") or {}).get("attributes"))
        except UNREADABLE as error:  # it may say that nothing of it must be trained on
            broken.add("broken resource", where, _sentence(error))
            continue
        for of_scope in _items(of_resource.get(names[1]), where, broken):
            for leaf in _items(of_scope.get(names[2]), where, broken):
                number += 1
                yield f"{where} {number}", leaf, resource


def _items(listed: object, where: str, broken: BrokenEntries) -> Iterator[Mapping[str, Any]]:
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, Mapping):
            yield each
        else:
            broken.add("no OTLP", where, f"{each!r} is no object")


def _otlp_span(raw: Mapping[str, Any], resource: Mapping[str, Any], logged: _EventsBySpan) -> GenAiSpan:
    listed = raw.get("events")
    events = listed if isinstance(listed, list) else []
    told = [(str(each["name"]), _attributes(each.get("attributes"))) for each in events]
    return GenAiSpan(
        span_id=str(raw["spanId"]),
        trace_id=str(raw["traceId"]),
        attributes=_attributes(raw.get("attributes")),
        events=told + logged.get((str(raw["traceId"]), str(raw["spanId"])), []),
        start=_seconds(raw.get("startTimeUnixNano")),
        failed=(raw.get("status") or {}).get("code") in {_ERROR, "STATUS_CODE_ERROR"},
        resource=resource,
        dropped=sum(int(raw.get(f"dropped{each}Count") or 0) for each in ("Attributes", "Events")),
    )


def _attributes(listed: object) -> dict[str, Any]:
    pairs = listed if isinstance(listed, list) else []
    return {str(each["key"]): _value(each.get("value") or {}) for each in pairs}


def _value(value: Mapping[str, Any]) -> Any:
    if "arrayValue" in value:
        return [_value(each) for each in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return _attributes(value["kvlistValue"].get("values"))
    if "intValue" in value:
        return int(value["intValue"])  # 64 bits travel as a string
    return next(iter(value.values()), None)


def read_studio(path: Path, broken: BrokenEntries | None = None) -> Iterator[LoggedExchange]:
    """The chats in AgentScope Studio's database, which is only read. An opt-out of any span holds for its trace."""
    unread = broken if broken is not None else BrokenEntries(strict=True)
    opted_out = set()
    for _, row in _studio_rows(path):
        with suppress(*UNREADABLE):  # counted where its messages are read
            if not (span := _studio_span(row)).may_train:
                opted_out.add(span.trace_id)
    for where, row in _studio_rows(path):
        try:
            span = _studio_span(row)
            exchange = exchange_of_span(span, source="studio", place=str(path))
        except UNREADABLE as error:
            unread.add("broken span", where, _sentence(error))
            continue
        if exchange is not None:
            yield replace(exchange, train=False) if span.trace_id in opted_out else exchange


def _studio_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise LogRefused(f"{path}: there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            # A damaged text spoils its row only: what is no UTF-8 in it makes no JSON, or a broken character.
            database.text_factory = lambda stored: stored.decode(errors="replace")
            columns = {row["name"] for row in database.execute(f"PRAGMA table_info({_STUDIO_TABLE})")}
            if not columns >= _STUDIO_NEEDS:
                raise LogRefused(f"{path}: no table {_STUDIO_TABLE} with {', '.join(sorted(_STUDIO_NEEDS))}")
            order = next((each for each in ("startTimeUnixNano", "startTime") if each in columns), "rowid")
            rows = database.execute(f"SELECT rowid AS place_, * FROM {_STUDIO_TABLE} ORDER BY {order}, rowid")
            yield from ((f"{path}: {_STUDIO_TABLE} row {row['place_']}", dict(row)) for row in rows)
    except sqlite3.DatabaseError as error:
        raise LogRefused(f"{path}: {error}") from None


def _studio_span(row: Mapping[str, Any]) -> GenAiSpan:
    stored = row["attributes"]
    attributes = _flat((json.loads(stored) if isinstance(stored, str) else stored) or {})
    for column, name in (("operationName", "gen_ai.operation.name"), ("conversationId", "gen_ai.conversation.id")):
        if row.get(column):
            attributes.setdefault(name, row[column])
    events = json_value(row.get("events")) or []
    return GenAiSpan(
        span_id=str(row.get("spanId") or row.get("id")),
        trace_id=str(row["traceId"]),
        attributes=attributes,
        events=[(str(each.get("name")), _flat(each.get("attributes") or {})) for each in events],
        start=_seconds(row.get("startTimeUnixNano")),
        failed=(json_value(row.get("status")) or {}).get("code") == _ERROR,
        resource=_flat((json_value(row.get("resource")) or {}).get("attributes") or {}),
    )


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
