"""The feedback routes with a span of each call, which links to the replies that it is about."""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi import Request

from tuneloop.explorer.feedback.routes import FeedbackRoutes, Results
from tuneloop.explorer.http.caller import Caller
from tuneloop.shared.experience import Feedback, Outcome
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
                    events=[
                        ("gen_ai.evaluation.result", self._of_event(each, results.outcomes[each.event_id]))
                        for each in events
                    ],
                )
            )
        return results

    def _of_event(self, event: Feedback, outcome: Outcome) -> dict[str, AttributeValue]:
        """What it says, but for its text, which is a user's."""
        found: dict[str, AttributeValue] = {
            "gen_ai.evaluation.name": self._recorder.name_as_stored(event.metric),
            "tuneloop.feedback.kind": event.kind.value,
            "tuneloop.feedback.outcome": outcome.value,
        }
        if event.value is not None:
            found["gen_ai.evaluation.score.value"] = event.value
        if event.msg_id is not None:
            found["gen_ai.response.id"] = event.msg_id
        return found
