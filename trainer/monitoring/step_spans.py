"""Spans of the training: of each step, linked to its replies, and of each version, linked to its steps."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuneloop.shared.experience import Sample
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import FinishedSpan, SpanId, new_span, span_of_reply, span_of_version

if TYPE_CHECKING:
    from tuneloop.shared.telemetry.tracing import Tracing


class StepSpans:
    """Sends them, if there is `tracing`; it remembers the steps since the last version."""

    def __init__(self, settings: Settings, tracing: "Tracing | None") -> None:
        self._experiment = f"{settings.project}/{settings.name}"
        self._tracing = tracing
        self._steps: list[SpanId] = []

    def send_step(self, step: int, batch: Sequence[Sample], *, started: int) -> None:
        """Of a step that ends now and began at `started`, in nanoseconds since 1970."""
        if self._tracing is None:
            return
        about: dict[str, str | int] = {"tuneloop.step": step, "tuneloop.experiences": len(batch)}
        links = [span_of_reply(each) for each in dict.fromkeys(sample.msg_id for sample in batch)]
        self._steps.append(place := new_span())
        self._tracing.send(FinishedSpan("step", place, started, time.time_ns(), about, links=links))

    def forget(self) -> None:
        """The steps since the last version are undone."""
        self._steps = []

    def send_version(self, version: int, *, step: int, steps: int, started: int) -> None:
        """Of a version of the first so many steps, registered now, that began to be published at `started`."""
        if self._tracing is None:
            return
        about: dict[str, str | int] = {"tuneloop.version": version, "tuneloop.step": step}
        links, self._steps = self._steps[:steps], self._steps[steps:]
        place = span_of_version(self._experiment, version)
        self._tracing.send(FinishedSpan("version", place, started, time.time_ns(), about, links=links))
