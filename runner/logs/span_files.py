"""Spans of files: OpenTelemetry's (OTLP as JSON), and the database of AgentScope Studio."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tuneloop.runner.errors import LogRefused
from tuneloop.runner.logs.exchange import LoggedExchange, json_lines
from tuneloop.runner.logs.spans import GenAiSpan, exchange_of_span

#: What was told of a span, in its order, by trace and span.
_EventsBySpan = Mapping[tuple[str, str], list[tuple[str, dict[str, Any]]]]

#: What the lines of a file are; a collector may write all of them into one.
_SIGNALS = ("resourceSpans", "resourceLogs", "resourceMetrics")

_ERROR = 2  # OpenTelemetry's code of a span that failed

#: The columns of Studio's table of spans that are read. `id` is `spanId` in releases before 1.0.8, which have none.
_STUDIO_TABLE = "span_table"
_STUDIO_NEEDS = {"traceId", "attributes"}

#: Values that are objects themselves and no names with dots.
_WHOLE = frozenset({"agentscope.function.input", "agentscope.function.output", "gen_ai.tool.call.arguments"})


def read_otlp(path: Path) -> Iterator[LoggedExchange]:
    """The chats in a file of OTLP as JSON: one object, or one a line, as the collector's file exporter writes them.

    Events may be log records of the same file, which name their span. Raises LogRefused for a file that is neither.
    """
    place, events = str(path), _logged_events(path)
    for where, batch in _batches(path):
        try:
            for span in _otlp_spans(batch, events):
                exchange = exchange_of_span(span, source="otel", place=place)
                if exchange is not None:
                    yield exchange
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise LogRefused(f"{where}: {error!r}") from None


def _batches(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, batch in _objects(path):
        if not isinstance(batch, dict) or not any(isinstance(batch.get(each), list) for each in _SIGNALS):
            raise LogRefused(f"{where}: none of {', '.join(_SIGNALS)}: this is not an OTLP file")
        yield where, batch


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise LogRefused(f"{path}: {error}") from None
    except (ValueError, RecursionError):
        yield from ((f"{path}:{number}", batch) for number, batch in json_lines(path))
        return
    yield from ((str(path), batch) for batch in (whole if isinstance(whole, list) else [whole]))


def _logged_events(path: Path) -> _EventsBySpan:
    """The events that stand as log records in the file, in the order of their time."""
    found: defaultdict[tuple[str, str], list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    for where, batch in _batches(path):
        try:
            for record in _log_records(batch):
                fields = _attributes(record.get("attributes"))
                name = record.get("eventName") or fields.get("event.name")
                body = _value(record.get("body") or {})
                if name and record.get("spanId"):
                    event = {**fields, **(body if isinstance(body, dict) else {})}
                    at = int(record.get("timeUnixNano") or record.get("observedTimeUnixNano") or 0)
                    found[str(record.get("traceId")), str(record["spanId"])].append((at, str(name), event))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise LogRefused(f"{where}: {error!r}") from None
    return {
        span: [(name, fields) for _, name, fields in sorted(events, key=lambda each: each[0])]
        for span, events in found.items()
    }


def _log_records(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for of_resource in batch.get("resourceLogs") or ():
        for of_scope in of_resource.get("scopeLogs") or ():
            yield from of_scope.get("logRecords") or ()


def _otlp_spans(batch: Mapping[str, Any], logged: _EventsBySpan) -> Iterator[GenAiSpan]:
    for of_resource in batch.get("resourceSpans") or ():
        resource = _attributes((of_resource.get("resource") or {}).get("attributes"))
        for of_scope in of_resource.get("scopeSpans") or ():
            for span in of_scope.get("spans") or ():
                yield GenAiSpan(
                    span_id=str(span["spanId"]),
                    trace_id=str(span["traceId"]),
                    attributes=_attributes(span.get("attributes")),
                    events=_events(span.get("events")) + logged.get((str(span["traceId"]), str(span["spanId"])), []),
                    start=_seconds(span.get("startTimeUnixNano")),
                    failed=(span.get("status") or {}).get("code") in {_ERROR, "STATUS_CODE_ERROR"},
                    resource=resource,
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


def read_studio(path: Path) -> Iterator[LoggedExchange]:
    """The chats in AgentScope Studio's database, an SQLite file with the table `span_table`; it is only read.

    Raises LogRefused for a file without such a table.
    """
    if not path.is_file():
        raise LogRefused(f"{path}: there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            columns = {row["name"] for row in database.execute(f"PRAGMA table_info({_STUDIO_TABLE})")}
            if not columns >= _STUDIO_NEEDS:
                raise LogRefused(f"{path}: no table {_STUDIO_TABLE} with {', '.join(sorted(_STUDIO_NEEDS))}")
            order = next((each for each in ("startTimeUnixNano", "startTime") if each in columns), "rowid")
            for row in database.execute(f"SELECT * FROM {_STUDIO_TABLE} ORDER BY {order}, rowid"):
                exchange = exchange_of_span(_studio_span(dict(row)), source="studio", place=str(path))
                if exchange is not None:
                    yield exchange
    except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:
        raise error if isinstance(error, LogRefused) else LogRefused(f"{path}: {error}") from None


def _studio_span(row: Mapping[str, Any]) -> GenAiSpan:
    attributes = _flat(_json(row["attributes"]) or {})
    for column, name in (("operationName", "gen_ai.operation.name"), ("conversationId", "gen_ai.conversation.id")):
        if row.get(column):
            attributes.setdefault(name, row[column])
    events = _json(row.get("events")) or []
    return GenAiSpan(
        span_id=str(row.get("spanId") or row.get("id")),
        trace_id=str(row["traceId"]),
        attributes=attributes,
        events=[(str(each.get("name")), _flat(each.get("attributes") or {})) for each in events],
        start=_seconds(row.get("startTimeUnixNano")),
        failed=(_json(row.get("status")) or {}).get("code") == _ERROR,
        resource=_flat((_json(row.get("resource")) or {}).get("attributes") or {}),
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


def _json(value: object) -> Any:
    """A column's value: TypeORM stores JSON as text; what is no JSON stays a text, and says nothing."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _seconds(nanoseconds: object) -> float | None:
    try:
        return int(str(nanoseconds)) / 1e9
    except ValueError:
        return None
