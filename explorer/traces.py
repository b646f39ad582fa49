"""The spans of a worker, by OpenTelemetry's conventions for generative AI, without any text of users."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tuneloop.shared.experience import Feedback, Outcome
from tuneloop.shared.telemetry.spans import (
    AttributeValue,
    FinishedSpan,
    RequestTrace,
    new_span,
    parse_traceparent,
    span_of_reply,
)

if TYPE_CHECKING:
    from tuneloop.explorer.proxy.request import Request
    from tuneloop.shared.telemetry.tracing import Tracing

_OPERATIONS = {"/v1/completions": "text_completion"}
_NS = 1_000_000_000


class Traces:
    def __init__(self, tracing: "Tracing", as_stored: Callable[[str], str]) -> None:
        self._tracing, self._as_stored = tracing, as_stored

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._tracing.close()

    @staticmethod
    def begin(traceparent: str | None) -> RequestTrace | None:
        """The spans of a request within its client's; None where the client wants none."""
        parent = parse_traceparent(traceparent)
        if parent is not None and not parent.sampled:
            return None
        own = new_span(parent and parent.id)
        return RequestTrace(parent and parent.id, own, new_span(own))

    def send_request(
        self, request: "Request", trace: RequestTrace, *, status: int, version: int | None, error: str
    ) -> None:
        started = int(request.received_at * _NS)
        attributes = self._of_request(request) | _of_reply(request, version)
        attributes |= {"http.response.status_code": status, "http.route": request.dialect.path}
        if error:
            attributes["error.type"] = error
        self._tracing.send(
            FinishedSpan(
                name=self._name_of(request),
                id=trace.request,
                started_ns=started,
                ended_ns=started + int((time.monotonic() - request.started) * _NS),
                attributes=attributes,
                kind="server",
                parent=trace.parent,
                error=error,
            )
        )

    def send_engine(
        self, request: "Request", trace: RequestTrace, *, started: int, engine: int, version: int | None
    ) -> None:
        attributes = self._of_request(request) | _of_reply(request, version)
        attributes |= {"gen_ai.provider.name": "vllm", "tuneloop.engine": engine}
        name, ended = self._name_of(request), time.time_ns()
        self._tracing.send(
            FinishedSpan(name, trace.engine, started, ended, attributes, kind="client", parent=trace.request)
        )

    def send_record(self, request: "Request", trace: RequestTrace, *, started: int, version: int) -> None:
        """A reply is on disk: what is said of it later links to this span, whose ids are made from its msg_id."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.id": request.msg_id,
            "tuneloop.version": version,
            "tuneloop.choices": len(request.writer.transcript.choices),
        }
        place = span_of_reply(request.msg_id)
        self._tracing.send(FinishedSpan("record", place, started, time.time_ns(), attributes, links=[trace.request]))

    def send_feedback(
        self, traceparent: str | None, started: int, events: Sequence[Feedback], outcomes: Mapping[str, Outcome]
    ) -> None:
        if (trace := self.begin(traceparent)) is None:
            return
        about = dict.fromkeys(each.msg_id for each in events if each.msg_id is not None)
        self._tracing.send(
            FinishedSpan(
                name="feedback",
                id=trace.request,
                started_ns=started,
                ended_ns=time.time_ns(),
                attributes={"tuneloop.events": len(events)},
                kind="server",
                parent=trace.parent,
                links=[span_of_reply(each) for each in about],
                events=[("gen_ai.evaluation.result", self._of_event(each, outcomes[each.event_id])) for each in events],
            )
        )

    def _of_event(self, event: Feedback, outcome: Outcome) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue] = {
            "gen_ai.evaluation.name": self._as_stored(event.metric),
            "tuneloop.feedback.kind": event.kind.value,
            "tuneloop.feedback.outcome": outcome.value,
        }
        if event.value is not None:
            found["gen_ai.evaluation.score.value"] = event.value
        if event.msg_id is not None:
            found["gen_ai.response.id"] = event.msg_id
        return found

    def _name_of(self, request: "Request") -> str:
        return f"{_operation(request)} {self._as_stored(request.model)}".strip()

    def _of_request(self, request: "Request") -> dict[str, AttributeValue]:
        """What is asked; of a client's words only names, as they may be stored."""
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _operation(request),
            "gen_ai.provider.name": "tuneloop",
            "gen_ai.request.model": self._as_stored(request.model),
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.request.temperature": request.sampling.temperature,
            "tuneloop.stored": request.store,
        }
        if request.labels.run_id:
            found["gen_ai.conversation.id"] = self._as_stored(request.labels.run_id)
        if request.labels.task_id:
            found["tuneloop.task_id"] = self._as_stored(request.labels.task_id)
        return found


def _operation(request: "Request") -> str:
    return _OPERATIONS.get(request.dialect.path, "chat")


def _of_reply(request: "Request", version: int | None) -> dict[str, AttributeValue]:
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
