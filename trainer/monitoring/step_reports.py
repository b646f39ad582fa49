"""What is told of steps: those that are not finite, of which many in a row end the training; pace; spans."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from tuneloop.shared.capacity.pace import VersionPace, note_version
from tuneloop.shared.experience import Sample, steady_clock
from tuneloop.shared.ledger.ledger import BatchPolicy, Ledger
from tuneloop.shared.ledger.versions.alarms import Alarm, Alarms
from tuneloop.shared.settings.settings import Settings
from tuneloop.shared.telemetry.spans import FinishedSpan, SpanId, new_span, span_of_reply, span_of_version

_log = structlog.get_logger()


class PaceLog:
    """The seconds of the steps since the last version."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings, self._ledger = settings, ledger
        self._policy = BatchPolicy.of(settings)
        self._step_s = 0.0
        self._lags = False

    def add_step(self, seconds: float) -> None:
        """A step was made."""
        self._step_s += seconds

    def end_version(self, epoch: int, consumed: int, *, publish_s: float) -> None:
        """A version of so many experiences was registered."""
        backlog = self._ledger.training.trim(epoch, self._policy)
        if backlog.set_aside and not self._lags:
            _log.warning("trainer_lags", set_aside=backlog.set_aside, waiting=backlog.waiting)
        self._lags = backlog.set_aside > 0
        version = VersionPace(
            at=steady_clock(),
            consumed=consumed,
            waiting=backlog.waiting,
            set_aside=backlog.set_aside,
            step_s=self._step_s,
            publish_s=publish_s,
        )
        self._step_s = 0.0
        try:
            note_version(self._settings.job_dir, version)
        except OSError as error:  # The next one is noted, too.
            _log.warning("pace_not_written", reason=str(error))


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


NOT_FINITE = "steps_not_finite"


class FiniteSteps:
    """Counts the steps in a row that were not finite, the last after `_skipped_after`; `_sound`: if one was."""

    def __init__(self, settings: Settings, alarms: Alarms) -> None:
        self._alarms, self._most = alarms, settings.algorithm.max_skipped_steps
        self._skipped, self._skipped_after, self._why_skipped = 0, 0, ""
        self._sound = False

    @property
    def too_few(self) -> bool:
        """Whether nothing more is to be learnt."""
        return self._skipped >= self._most

    def note_failure(self, reason: str, *, after: int) -> None:
        """The step after `after` was not finite."""
        self._skipped, self._skipped_after, self._why_skipped = self._skipped + 1, after, reason

    def note_success(self, step: int) -> None:
        """This step was finite, and is not one made again from before the last that was not."""
        if step > self._skipped_after and (self._skipped or not self._sound):
            self._alarms.clear(NOT_FINITE)
            self._skipped, self._sound = 0, True

    def alarm(self, *, step: int, version: int) -> None:
        """So many steps in a row that were not finite are no accident: nothing more is learnt or published.

        The explorer goes on serving what it serves, and no further row is spent on it; a restart tries again.
        """
        reason = f"{self._skipped} steps in a row were not finite, the last because {self._why_skipped}"
        if self._alarms.raise_alarm(Alarm(name=NOT_FINITE, reason=f"{reason}; training has stopped", step=step)):
            _log.error("training_stopped", reason=reason, version=version)
