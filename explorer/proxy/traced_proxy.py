"""The proxy with a trace of each request: `chat` (the client's request), `chat` again (the engine's part), `record`.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI. No text of users is in them.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from tuneloop.explorer.dialects.dialect import Dialect
from tuneloop.explorer.engines.fleet import Engine
from tuneloop.explorer.http import errors
from tuneloop.explorer.http.raw_request import RawRequest
from tuneloop.explorer.proxy.in_flight import ReplyInFlight
from tuneloop.explorer.proxy.proxy import Proxy, RequestOutcome
from tuneloop.explorer.proxy.request import Request
from tuneloop.shared.telemetry.spans import (
    AttributeValue,
    FinishedSpan,
    RequestTrace,
    new_span,
    parse_traceparent,
    span_of_reply,
)

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing

_OPERATIONS = {"/v1/completions": "text_completion"}
_NS = 1_000_000_000


async def close_at_end(tracing: "Tracing") -> None:
    """Send the last spans when the service ends."""
    try:
        await asyncio.Event().wait()
    finally:
        tracing.close()


class TracedProxy(Proxy):
    """Tells of each request that gets as far as an engine."""

    def __init__(self, tracing: "Tracing", *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tracing = tracing

    async def _answer_in_time(self, request: Request, raw: RawRequest, outcome: RequestOutcome) -> None:
        parent = parse_traceparent(raw.header(b"traceparent"))
        if parent is not None and not parent.sampled:
            return await super()._answer_in_time(request, raw, outcome)
        own = new_span(parent and parent.id)
        trace = RequestTrace(parent and parent.id, own, new_span(own))
        request = request._replace(trace=trace)
        error = ""
        try:
            await super()._answer_in_time(request, raw, outcome)
        except asyncio.CancelledError:
            error = "the client left"
            raise
        except Exception as failure:
            error = errors.refusal_of(failure).code or type(failure).__name__
            raise
        finally:
            self._tracing.send(self._request_span(request, trace, outcome, error))

    async def _answer_from(self, engine: Engine, request: Request, raw: RawRequest, outcome: RequestOutcome) -> None:
        started = time.time_ns()
        try:
            await super()._answer_from(engine, request, raw, outcome)
        finally:
            if request.trace is not None:
                attributes = self._of_request(request) | _of_reply(request, outcome.version)
                attributes |= {"gen_ai.provider.name": "vllm", "tuneloop.engine": engine.number}
                name, place = self._name_of(request), request.trace
                ended = time.time_ns()
                self._tracing.send(
                    FinishedSpan(name, place.engine, started, ended, attributes, kind="client", parent=place.request)
                )

    async def _record(self, in_flight: ReplyInFlight) -> None:
        started, request = time.time_ns(), in_flight.request
        await super()._record(in_flight)
        if request.trace is not None and request.store and request.writer.transcript.choices:
            self._tracing.send(_record_span(request, request.trace, in_flight.version, started))

    def _request_span(self, request: Request, trace: RequestTrace, outcome: RequestOutcome, error: str) -> FinishedSpan:
        started = int(request.received_at * _NS)
        attributes = self._of_request(request) | _of_reply(request, outcome.version)
        attributes["http.response.status_code"] = outcome.status
        attributes["http.route"] = request.dialect.path
        if error:
            attributes["error.type"] = error
        return FinishedSpan(
            name=self._name_of(request),
            id=trace.request,
            started_ns=started,
            ended_ns=started + int((time.monotonic() - request.started) * _NS),
            attributes=attributes,
            kind="server",
            parent=trace.parent,
            error=error,
        )

    def _name_of(self, request: Request) -> str:
        return f"{_operation(request.dialect)} {self._recorder.name_as_stored(request.model)}".strip()

    def _of_request(self, request: Request) -> dict[str, AttributeValue]:
        """What is asked; of a client's words only names, as they may be stored."""
        as_stored = self._recorder.name_as_stored
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _operation(request.dialect),
            "gen_ai.provider.name": "tuneloop",
            "gen_ai.request.model": as_stored(request.model),
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.request.temperature": request.sampling.temperature,
            "tuneloop.stored": request.store,
        }
        if request.labels.run_id:
            found["gen_ai.conversation.id"] = as_stored(request.labels.run_id)
        if request.labels.task_id:
            found["tuneloop.task_id"] = as_stored(request.labels.task_id)
        return found


def _record_span(request: Request, trace: RequestTrace, version: int, started: int) -> FinishedSpan:
    """The reply on its way to disk: what is said of it later links to this span, whose ids are made from its msg_id."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": request.msg_id,
        "tuneloop.version": version,
        "tuneloop.choices": len(request.writer.transcript.choices),
    }
    place = span_of_reply(request.msg_id)
    return FinishedSpan("record", place, started, time.time_ns(), attributes, links=[trace.request])


def _operation(dialect: Dialect) -> str:
    return _OPERATIONS.get(dialect.path, "chat")


def _of_reply(request: Request, version: int | None) -> dict[str, AttributeValue]:
    choices = request.writer.transcript.choices.values()
    found: dict[str, AttributeValue] = {"gen_ai.response.id": request.msg_id}
    if version is not None:
        found["tuneloop.version"] = version
    if choices:
        sampled = sum(len(each.completion_ids) for each in choices)
        found["gen_ai.usage.output_tokens"] = sampled
        found["gen_ai.usage.input_tokens"] = request.writer.transcript.tokens - sampled
        found["gen_ai.response.finish_reasons"] = [each.finish_reason or "" for each in choices]
    return found
