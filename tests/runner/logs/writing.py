"""Files as others write them, for the tests of importing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

USER = {"role": "user", "content": "Where is my parcel?"}
ANSWER = {"role": "assistant", "content": "On its way."}
CALL = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"number": 7}'}}
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def otlp(*spans: dict[str, Any], resource: dict[str, Any] | None = None) -> dict[str, Any]:
    """A batch of OTLP as JSON; a span is {"id", "trace", "attributes", "events", "status"}."""
    made = [
        {
            "traceId": each.get("trace", "a" * 32),
            "spanId": each["id"],
            "name": "chat",
            "startTimeUnixNano": "1700000000000000000",
            "attributes": key_values(each["attributes"]),
            "events": [{"name": name, "attributes": key_values(fields)} for name, fields in each.get("events", ())],
            "status": each.get("status", {}),
        }
        for each in spans
    ]
    about = {"attributes": key_values(resource or {})}
    return {"resourceSpans": [{"resource": about, "scopeSpans": [{"scope": {"name": "app"}, "spans": made}]}]}


def key_values(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in fields.items()]


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": key_values(value)}}
    return {"stringValue": value}
