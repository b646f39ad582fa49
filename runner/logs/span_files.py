"""Spans of files: OpenTelemetry's (OTLP as JSON), and the database of AgentScope Studio."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.broken import UNREADABLE, BrokenEntries
from tuneloop.runner.logs.exchange import LoggedExchange, json_lines, json_value
from tuneloop.runner.logs.spans import GenAiSpan, exchange_of_span

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
    """The chats in a file of OTLP as JSON: one object, or one a line, as the collector's file exporter writes them.

    Events may be log records of the same file, which name their span. An opt-out of any span holds for its trace. What
    is neither, and a span that cannot be read, is put to `broken`; without that it raises LogRefused.
    """
    unread = broken if broken is not None else BrokenEntries(strict=True)
    told = _read_ahead(path, unread)
    for where, batch in _batches(path, _second_reading()):
        for at, raw, resource in _leaves(batch, _SPANS, f"{where}: span", _second_reading()):
            try:
                span = _otlp_span(raw, resource, told.events)
                exchange = exchange_of_span(span, source="otel", place=str(path))
            except UNREADABLE as error:
                unread.add("broken span", at, _sentence(error))
                continue
            if exchange is not None:
                barred = span.trace_id in told.opted_out
                yield replace(exchange, train=False) if barred else exchange


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What must be known of a whole file before its first span is: events that are log records, and opt-outs."""

    events: _EventsBySpan
    opted_out: frozenset[str]


def _second_reading() -> BrokenEntries:
    """For what was counted already when the file was read ahead."""
    return BrokenEntries()


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)


def _batches(path: Path, broken: BrokenEntries) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, batch in _objects(path, broken):
        if isinstance(batch, dict) and any(isinstance(batch.get(each), list) for each in _SIGNALS):
            yield where, batch
        else:
            broken.add("no OTLP", where, f"none of {', '.join(_SIGNALS)}: this is not an OTLP file")


def _objects(path: Path, broken: BrokenEntries) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise LogRefused(f"{path}: {error}") from None
    except (ValueError, RecursionError):
        yield from ((f"{path}:{number}", batch) for number, batch in json_lines(path, broken))
        return
    yield from ((str(path), batch) for batch in (whole if isinstance(whole, list) else [whole]))


def _read_ahead(path: Path, broken: BrokenEntries) -> _Ahead:
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
    return _Ahead(events, frozenset(opted_out))


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
    return GenAiSpan(
        span_id=str(raw["spanId"]),
        trace_id=str(raw["traceId"]),
        attributes=_attributes(raw.get("attributes")),
        events=_events(raw.get("events")) + logged.get((str(raw["traceId"]), str(raw["spanId"])), []),
        start=_seconds(raw.get("startTimeUnixNano")),
        failed=(raw.get("status") or {}).get("code") in {_ERROR, "STATUS_CODE_ERROR"},
        resource=resource,
        dropped=sum(int(raw.get(f"dropped{each}Count") or 0) for each in ("Attributes", "Events")),
    )


def _events(listed: object) -> list[tuple[str, dict[str, Any]]]:
    events = listed if isinstance(listed, list) else []
    return [(str(each["name"]), _attributes(each.get("attributes"))) for each in events]


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
    """The chats in AgentScope Studio's database, an SQLite file with the table `span_table`; it is only read.

    An opt-out of any span holds for its trace. A span that cannot be read is put to `broken`; without that it raises
    LogRefused, as for a file without such a table.
    """
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
            database.text_factory = _text
            columns = {row["name"] for row in database.execute(f"PRAGMA table_info({_STUDIO_TABLE})")}
            if not columns >= _STUDIO_NEEDS:
                raise LogRefused(f"{path}: no table {_STUDIO_TABLE} with {', '.join(sorted(_STUDIO_NEEDS))}")
            order = next((each for each in ("startTimeUnixNano", "startTime") if each in columns), "rowid")
            rows = database.execute(f"SELECT rowid AS place_, * FROM {_STUDIO_TABLE} ORDER BY {order}, rowid")
            yield from ((f"{path}: {_STUDIO_TABLE} row {row['place_']}", dict(row)) for row in rows)
    except sqlite3.DatabaseError as error:
        raise LogRefused(f"{path}: {error}") from None


def _text(stored: bytes) -> str:
    """A damaged text spoils its row only: what is no UTF-8 in it makes no JSON, or a broken character."""
    return stored.decode(errors="replace")


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
