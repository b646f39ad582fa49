"""What a reply may be called on another's wire, by what its request carried: pages rate a trace, not a reply."""

from collections.abc import Mapping
from typing import Any

from tuneloop.shared.experience import trace_keys
from tuneloop.shared.telemetry.spans import parse_traceparent


def traces_of(
    request_id: str | None, traceparent: str | None, body: Mapping[str, Any], labels: tuple[str | None, ...]
) -> tuple[str, ...]:
    """The keys of its traces: of `x-request-id`, of `metadata.trace_id`, of labels, and OpenTelemetry's own id."""
    metadata, parent = body.get("metadata"), parse_traceparent(traceparent)
    own = metadata.get("trace_id") if isinstance(metadata, dict) else None
    keys = trace_keys(request_id, own if isinstance(own, str) else None, *labels)
    return keys if parent is None else (*keys, f"{parent.id.trace:032x}")
