"""The feedback routes with a span of each call, which links to the replies that it is about."""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi import Request

from tuneloop.explorer.feedback.routes import FeedbackRoutes, Results
from tuneloop.explorer.http.caller import Caller
from tuneloop.shared.experience import Feedback
from tuneloop.shared.telemetry.spans import (
    AttributeValue,
    FinishedSpan,
    RemoteParent,
    new_span,
    parse_traceparent,
    span_of_reply,
)

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing

_parent: ContextVar[RemoteParent | None] = ContextVar("parent", default=None)


class TracedFeedbackRoutes(FeedbackRoutes):
    """Tells of all feedback that is about replies of ours."""

    def __init__(self, tracing: "Tracing", **more: Any) -> None:
        super().__init__(**more)
        self._tracing = tracing

    async def feedback(self, request: Request) -> dict[str, object]:
        """The same, within the client's span."""
        _parent.set(parse_traceparent(request.headers.get("traceparent")))
        return await super().feedback(request)

    async def _store(self, events: Sequence[Feedback], caller: Caller) -> Results:
        started, parent = time.time_ns(), _parent.get()
        results = await super()._store(events, caller)
        if parent is None or parent.sampled:
            told: list[tuple[str, dict[str, AttributeValue]]] = []
            for each in events:  # what it says, but for its text, which is a user's
                found: dict[str, AttributeValue] = {
                    "gen_ai.evaluation.name": self._recorder.name_as_stored(each.metric),
                    "tuneloop.feedback.kind": each.kind.value,
                    "tuneloop.feedback.outcome": results.outcomes[each.event_id].value,
                }
                if each.value is not None:
                    found["gen_ai.evaluation.score.value"] = each.value
                if each.msg_id is not None:
                    found["gen_ai.response.id"] = each.msg_id
                told.append(("gen_ai.evaluation.result", found))
            about = dict.fromkeys(each.msg_id for each in events if each.msg_id is not None)
            self._tracing.send(
                FinishedSpan(
                    name="feedback",
                    id=new_span(parent and parent.id),
                    started_ns=started,
                    ended_ns=time.time_ns(),
                    attributes={"tuneloop.events": len(events)},
                    kind="server",
                    parent=parent and parent.id,
                    links=[span_of_reply(each) for each in about],
                    events=told,
                )
            )
        return results
