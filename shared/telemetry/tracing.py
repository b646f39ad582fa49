"""Sends spans to an OTLP receiver, in the background: one that is away costs spans, never a request."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tuneloop.shared import VERSION
from tuneloop.shared.telemetry.spans import FinishedSpan, SpanId

#: A span links to so many others at most, and has so many events.
MOST_LINKS = 128

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SCOPE = InstrumentationScope("tuneloop", VERSION)

#: An export that takes longer has failed; the service's end waits as long.
_TIMEOUT_S = 5


class Tracing:
    """Spans of one process, on their way to `{url}/v1/traces`; OpenTelemetry's variables add headers and the like."""

    def __init__(self, url: str, *, service: str, experiment: str) -> None:
        exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._resource = Resource.create(
            {"service.name": f"tuneloop-{service}", "service.version": VERSION, "tuneloop.experiment": experiment}
        )
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)

    def send(self, span: FinishedSpan) -> None:
        """Take a span over. Never waits: when too many wait already, the oldest go."""
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_context(span.id),
                parent=None if span.parent is None else _context(span.parent),
                resource=self._resource,
                attributes=dict(span.attributes),
                events=[Event(name, dict(values), span.ended_ns) for name, values in span.events[:MOST_LINKS]],
                links=[Link(_context(each)) for each in span.links[:MOST_LINKS]],
                kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=span.started_ns,
                end_time=span.ended_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(place: SpanId) -> SpanContext:
    return SpanContext(place.trace, place.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
